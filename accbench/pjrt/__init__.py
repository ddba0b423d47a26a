"""NVIDIA GPUs for torch_xla, which no longer ships CUDA itself."""
