"""What a run records and shows while it goes on."""
