"""Padding by reflection and by repeating the edge, and its gradients."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from accbench.engines.jax.lowering.dtypes import opmath
from accbench.engines.jax.lowering.table import lowering


def _padded(self: Any, padding: Sequence[int], mode: str) -> Any:
    """`padding` counts from the last axis on; negative widths cut off."""
    rank = len(padding) // 2
    pairs = [(padding[2 * i], padding[2 * i + 1]) for i in reversed(range(rank))]
    cut = (slice(None),) * (self.ndim - rank) + tuple(
        slice(max(-low, 0), n - max(-high, 0))
        for n, (low, high) in zip(self.shape[self.ndim - rank :], pairs, strict=True)
    )
    widths = [(0, 0)] * (self.ndim - rank) + [(max(a, 0), max(b, 0)) for a, b in pairs]
    return jnp.pad(self[cut], widths, mode=mode)


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
