"""What models are trained for: a loss, its batches and its checks, a module a task."""
