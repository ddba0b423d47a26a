"""Padding by reflection and by repeating the edge, and its gradients."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from accbench.engines.jax.lowering.dtypes import opmath
from accbench.engines.jax.lowering.table import lowering


def _pad(self: Any, padding: Sequence[int], mode: str) -> Any:
    """Pad by `padding`, which counts from the last axis on; negative widths cut off."""
    rank = len(padding) // 2
    pairs = [(padding[2 * i], padding[2 * i + 1]) for i in reversed(range(rank))]
    if min(padding) < 0:
        return _pad_by_index(self, pairs, mode)
    return jnp.pad(self, [(0, 0)] * (self.ndim - rank) + pairs, mode=mode)


def _pad_by_index(self: Any, pairs: Sequence[tuple[int, int]], mode: str) -> Any:
    """Pad or cut off, by the index that each position takes its element from."""
    for i, (low, high) in enumerate(pairs):
        axis = self.ndim - len(pairs) + i
        size = self.shape[axis]
        sources = np.arange(-low, size + high)
        if mode == "reflect":
            sources = size - 1 - np.abs(size - 1 - np.abs(sources))
        self = jnp.take(self, np.clip(sources, 0, size - 1), axis=axis)
    return self


def _register(name: str, mode: str) -> None:
    def forward(self: Any, padding: Sequence[int]) -> Any:
        return _pad(self, padding, mode)

    def backward(grad_output: Any, self: Any, padding: Sequence[int]) -> Any:
        like = jax.ShapeDtypeStruct(self.shape, opmath(self.dtype))
        pad = jax.linear_transpose(lambda x: _pad(x, padding, mode), like)
        return pad(grad_output.astype(like.dtype))[0].astype(grad_output.dtype)

    lowering(f"aten.{name}.default")(forward)
    lowering(f"aten.{name}_backward.default")(backward)


for _rank in (1, 2, 3):
    _register(f"reflection_pad{_rank}d", "reflect")
    _register(f"replication_pad{_rank}d", "edge")
