"""Ahead-of-time compilation of a training step for an absent GPU, and what the step needs there."""
