"""accbench: train a PyTorch model as a DDP baseline or compiled by XLA, and measure both alike."""

__version__ = "0.1.0"
