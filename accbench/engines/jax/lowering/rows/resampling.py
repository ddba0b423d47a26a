"""Interpolation to another size, and its gradients.

Each axis is resampled by itself. Where values are mixed, that is a matrix of weights made on the
host, whose transpose is the gradient. Where the nearest is taken, it is an index.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from accbench.engines.jax.lowering.rows.pooling import apply_matrices
from accbench.engines.jax.lowering.table import lowering
from accbench.engines.xla_common import resampling
from accbench.engines.xla_common.resampling import MatrixBuilder, Scale


def _scales(scales: Sequence[Scale] | None, rank: int) -> list[Scale]:
    return [*scales] if scales else [None] * rank


def _sizes(input: Any, output_size: Any, factors: Any, rank: int) -> list[int]:
    if output_size is not None:
        return [*output_size]
    return [math.floor(n * f) for n, f in zip(input.shape[-rank:], factors, strict=True)]


def _matrices(
    matrix: MatrixBuilder, old: Sequence[int], new: Sequence[int], align_corners: bool, scales: Any
) -> list[np.ndarray]:
    each = zip(old, new, _scales(scales, len(old)), strict=True)
    return [matrix(n, m, align_corners, scale) for n, m, scale in each]


def _register_weighted(name: str, matrix: MatrixBuilder, rank: int) -> None:
    def forward(self: Any, output_size: Sequence[int], align_corners: bool, *scales: Any) -> Any:
        old = self.shape[-rank:]
        return apply_matrices(self, _matrices(matrix, old, output_size, align_corners, scales))

    def vec(input: Any, output_size: Any, align_corners: bool, scale_factors: Any) -> Any:
        new = _sizes(input, output_size, scale_factors, rank)
        return forward(input, new, align_corners, *_scales(scale_factors, rank))

    def backward(
        grad_output: Any,
        output_size: Sequence[int],
        input_size: Sequence[int],
        align_corners: bool,
        *scales: Any,
    ) -> Any:
        old = input_size[-rank:]
        matrices = _matrices(matrix, old, output_size, align_corners, scales)
        return apply_matrices(grad_output, [m.T for m in matrices])

    lowering(f"aten.{name}.default")(forward)
    lowering(f"aten.{name}.vec")(vec)
    lowering(f"aten.{name}_backward.default")(backward)


def _nearest(self: Any, output_size: Sequence[int], scales: Any, offset: float) -> Any:
    rank = len(output_size)
    for i, (output, scale) in enumerate(zip(output_size, _scales(scales, rank), strict=True)):
        size = self.shape[self.ndim - rank + i]
        indices = resampling.nearest(size, output, scale, offset).astype(np.int32)
        self = jnp.take(self, indices, axis=self.ndim - rank + i)
    return self


def _register_nearest(name: str, offset: float, rank: int) -> None:
    def forward(self: Any, output_size: Sequence[int], *scales: Any) -> Any:
        return _nearest(self, output_size, scales, offset)

    def vec(input: Any, output_size: Any, scale_factors: Any) -> Any:
        new = _sizes(input, output_size, scale_factors, rank)
        return _nearest(input, new, scale_factors, offset)

    def backward(
        grad_output: Any, output_size: Sequence[int], input_size: Sequence[int], *scales: Any
    ) -> Any:
        like = jax.ShapeDtypeStruct(tuple(input_size), jnp.float32)
        pick = jax.linear_transpose(lambda x: _nearest(x, output_size, scales, offset), like)
        return pick(grad_output.astype(jnp.float32))[0].astype(grad_output.dtype)

    lowering(f"aten.{name}.default")(forward)
    lowering(f"aten.{name}.vec")(vec)
    lowering(f"aten.{name}_backward.default")(backward)


for _name, (_weights, _rank) in resampling.INTERPOLATIONS.items():
    _register_weighted(_name, _weights, _rank)
for _name, (_offset, _rank) in resampling.NEAREST.items():
    _register_nearest(_name, _offset, _rank)
