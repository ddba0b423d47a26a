"""Training compiled by XLA, through torch_xla: the engine, and what it is made of."""

from accbench.engines.xla.engine import Engine

__all__ = ["Engine"]
