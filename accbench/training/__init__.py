"""A worker from top to bottom, the one training loop, and the one place that waits."""
