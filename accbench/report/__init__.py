"""Records in, pages out: pure functions."""
