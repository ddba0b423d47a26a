"""Training in a worker: its one training loop, and the one place that waits for the device."""
