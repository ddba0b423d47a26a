"""A training step compiled for a GPU that is not here: what it needs, moves and at best does."""
