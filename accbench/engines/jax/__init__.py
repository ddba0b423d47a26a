"""Engine jax: training compiled by XLA through JAX, for every torch."""

from accbench.engines.jax.engine import Engine

__all__ = ["Engine"]
