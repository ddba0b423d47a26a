"""Padding by reflection and by repeating the edge, and its gradients."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from accbench.engines.jax.lowering.dtypes import opmath
from accbench.engines.jax.lowering.table import lowering


def _padded(self: Any, padding: Sequence[int], mode: str) -> Any:
    """`padding` counts from the last axis on; negative widths cut off."""
    rank = len(padding) // 2
    pairs = [(padding[2 * i], padding[2 * i + 1]) for i in reversed(range(rank))]
    if min(padding) < 0:
        return _picked(self, pairs, mode)
    return jnp.pad(self, [(0, 0)] * (self.ndim - rank) + pairs, mode=mode)


def _picked(self: Any, pairs: Sequence[tuple[int, int]], mode: str) -> Any:
    """The same with widths below 0, which cut off: each place from where it comes."""
    for i, (low, high) in enumerate(pairs):
        axis = self.ndim - len(pairs) + i
        size = self.shape[axis]
        places = np.arange(-low, size + high)
        if mode == "reflect":
            places = size - 1 - np.abs(size - 1 - np.abs(places))
        self = jnp.take(self, np.clip(places, 0, size - 1), axis=axis)
    return self


def _rows(name: str, mode: str) -> None:
    def forward(self: Any, padding: Sequence[int]) -> Any:
        return _padded(self, padding, mode)

    def backward(grad_output: Any, self: Any, padding: Sequence[int]) -> Any:
        like = jax.ShapeDtypeStruct(self.shape, opmath(self.dtype))
        pad = jax.linear_transpose(lambda x: _padded(x, padding, mode), like)
        return pad(grad_output.astype(like.dtype))[0].astype(grad_output.dtype)

    lowering(f"aten.{name}.default")(forward)
    lowering(f"aten.{name}_backward.default")(backward)


for _rank in (1, 2, 3):
    _rows(f"reflection_pad{_rank}d", "reflect")
    _rows(f"replication_pad{_rank}d", "edge")
