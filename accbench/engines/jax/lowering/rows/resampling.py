"""Interpolation to another size, and its gradients.

Each axis is resampled by itself: by a matrix of weights made on the host where values are mixed,
whose transpose is the gradient, and by picking where the nearest is taken.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from accbench.engines.jax.lowering.rows.pooling import along_axes
from accbench.engines.jax.lowering.table import lowering

Scale = float | None
Matrix = Callable[[int, int, bool, Scale], np.ndarray]


def _step(size: int, output: int, align_corners: bool, scale: Scale) -> float:
    """Input elements from one output element to the next."""
    if align_corners:
        return (size - 1) / (output - 1) if output > 1 else 0.0
    return 1 / scale if scale else size / output


def _centers(size: int, output: int, align_corners: bool, scale: Scale) -> np.ndarray:
    step, places = _step(size, output, align_corners, scale), np.arange(output)
    return step * places if align_corners else step * (places + 0.5) - 0.5


def _matrix(output: int, size: int, taps: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(output, size) from `taps` and `weights`, both (output, num_taps); taps keep to the axis."""
    matrix = np.zeros((output, size))
    np.add.at(matrix, (np.arange(output)[:, None], np.clip(taps, 0, size - 1)), weights)
    return matrix


def linear(size: int, output: int, align_corners: bool, scale: Scale) -> np.ndarray:
    center = np.maximum(_centers(size, output, align_corners, scale), 0)
    first = np.minimum(np.floor(center), size - 1).astype(int)
    part = center - first
    return _matrix(output, size, np.stack([first, first + 1], 1), np.stack([1 - part, part], 1))


def _cubic(x: np.ndarray, a: float) -> np.ndarray:
    """Keys' kernel: https://doi.org/10.1109/TASSP.1981.1163711."""
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * a - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0))


def cubic(size: int, output: int, align_corners: bool, scale: Scale) -> np.ndarray:
    center = _centers(size, output, align_corners, scale)
    taps = np.floor(center).astype(int)[:, None] + np.arange(-1, 3)
    return _matrix(output, size, taps, _cubic(center[:, None] - taps, -0.75))


def _antialiased(
    kernel: Callable[[np.ndarray], np.ndarray],
    radius: int,
    size: int,
    output: int,
    align_corners: bool,
    scale: Scale,
) -> np.ndarray:
    """A kernel that grows with the step where an axis shrinks, cut off at the ends."""
    step = _step(size, output, align_corners, scale)
    grown = max(step, 1.0)
    matrix = np.zeros((output, size))
    for i in range(output):
        center = step * (i + 0.5)
        begin = max(int(center - radius * grown + 0.5), 0)
        end = min(int(center + radius * grown + 0.5), size)
        weights = kernel((np.arange(begin, end) - center + 0.5) / grown)
        matrix[i, begin:end] = weights / (weights.sum() or 1)
    return matrix


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(x), 0)


linear_antialiased = functools.partial(_antialiased, _triangle, 1)
cubic_antialiased = functools.partial(_antialiased, functools.partial(_cubic, a=-0.5), 2)


def _scales(scales: Sequence[Scale] | None, rank: int) -> list[Scale]:
    return [*scales] if scales else [None] * rank


def _sizes(input: Any, output_size: Any, factors: Any, rank: int) -> list[int]:
    if output_size is not None:
        return [*output_size]
    return [math.floor(n * f) for n, f in zip(input.shape[-rank:], factors, strict=True)]


def _matrices(
    matrix: Matrix, old: Sequence[int], new: Sequence[int], align_corners: bool, scales: Any
) -> list[np.ndarray]:
    each = zip(old, new, _scales(scales, len(old)), strict=True)
    return [matrix(n, m, align_corners, scale) for n, m, scale in each]


def _mixing_rows(name: str, matrix: Matrix, rank: int) -> None:
    def forward(self: Any, output_size: Sequence[int], align_corners: bool, *scales: Any) -> Any:
        old = self.shape[-rank:]
        return along_axes(self, _matrices(matrix, old, output_size, align_corners, scales))

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
        return along_axes(grad_output, [m.T for m in matrices])

    lowering(f"aten.{name}.default")(forward)
    lowering(f"aten.{name}.vec")(vec)
    lowering(f"aten.{name}_backward.default")(backward)


def _nearest(self: Any, output_size: Sequence[int], scales: Any, offset: float) -> Any:
    rank = len(output_size)
    for i, (output, scale) in enumerate(zip(output_size, _scales(scales, rank), strict=True)):
        size = self.shape[self.ndim - rank + i]
        # In float32, as torch counts, which is off by one here and there.
        step = np.float32(1 / scale) if scale else np.float32(size) / np.float32(output)
        places = np.floor((np.arange(output, dtype=np.float32) + np.float32(offset)) * step)
        taken = np.minimum(places, size - 1).astype(np.int32)
        self = jnp.take(self, taken, axis=self.ndim - rank + i)
    return self


def _picking_rows(name: str, offset: float, rank: int) -> None:
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


_MIXING: dict[str, tuple[Matrix, int]] = {
    "upsample_linear1d": (linear, 1),
    "upsample_bilinear2d": (linear, 2),
    "upsample_trilinear3d": (linear, 3),
    "upsample_bicubic2d": (cubic, 2),
    "_upsample_bilinear2d_aa": (linear_antialiased, 2),
    "_upsample_bicubic2d_aa": (cubic_antialiased, 2),
}
for _name, (_weights, _rank) in _MIXING.items():
    _mixing_rows(_name, _weights, _rank)
for _rank in (1, 2, 3):
    _picking_rows(f"upsample_nearest{_rank}d", 0, _rank)
    _picking_rows(f"_upsample_nearest_exact{_rank}d", 0.5, _rank)
