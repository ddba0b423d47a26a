"""Engine ddp: eager PyTorch under DistributedDataParallel, the baseline."""

from accbench.engines.ddp.engine import Engine

__all__ = ["Engine"]
