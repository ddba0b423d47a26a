"""NVIDIA GPUs for torch_xla, which ships no CUDA of its own any more."""
