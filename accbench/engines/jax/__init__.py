"""Training compiled by XLA through JAX, for any torch: the engine, and what it is made of."""

from accbench.engines.jax.engine import Engine

__all__ = ["Engine"]
