"""accbench: train a PyTorch model as a DDP baseline or compiled by XLA, and measure both alike."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["accelerate"]


def __getattr__(name: str) -> Any:
    # Found when asked for: importing accbench imports no torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from accbench.training.accelerate import accelerate

    return accelerate
