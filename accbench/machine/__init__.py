"""What is on this machine, and whether it can train."""
