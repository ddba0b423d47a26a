"""Engine inductor: torch.compile under DistributedDataParallel."""

from accbench.engines.inductor.engine import Engine

__all__ = ["Engine"]
