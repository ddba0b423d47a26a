"""Parts that several launchers share."""
