"""Processes that train together: who they are, how they meet, what they exchange."""
