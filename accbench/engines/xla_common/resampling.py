"""Weights by which an axis is resampled as torch does it, computed on the host."""

import functools
from collections.abc import Callable

import numpy as np

Scale = float | None
# (size, output, align_corners, scale) -> (output, size): for each output the inputs' weights.
MatrixBuilder = Callable[[int, int, bool, Scale], np.ndarray]


def _step_size(size: int, output: int, align_corners: bool, scale: Scale) -> float:
    """Return the distance between neighbouring output elements, in input elements."""
    if align_corners:
        return (size - 1) / (output - 1) if output > 1 else 0.0
    return 1 / scale if scale else size / output


def _centers(size: int, output: int, align_corners: bool, scale: Scale) -> np.ndarray:
    step, positions = _step_size(size, output, align_corners, scale), np.arange(output)
    return step * positions if align_corners else step * (positions + 0.5) - 0.5


def _matrix(output: int, size: int, taps: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Build a matrix (output, size) from taps and their weights.

    Args:
        output: length of the resampled axis.
        size: length of the input axis.
        taps: input indices, (output, num_taps); those outside the axis are clipped to its ends.
        weights: (output, num_taps).
    """
    matrix = np.zeros((output, size))
    np.add.at(matrix, (np.arange(output)[:, None], np.clip(taps, 0, size - 1)), weights)
    return matrix


def linear(size: int, output: int, align_corners: bool, scale: Scale) -> np.ndarray:
    """Return the matrix (output, size) of linear interpolation."""
    center = np.maximum(_centers(size, output, align_corners, scale), 0)
    first = np.minimum(np.floor(center), size - 1).astype(int)
    fraction = center - first
    return _matrix(
        output, size, np.stack([first, first + 1], 1), np.stack([1 - fraction, fraction], 1)
    )


def _cubic(x: np.ndarray, a: float) -> np.ndarray:
    """Compute Keys' kernel: https://doi.org/10.1109/TASSP.1981.1163711."""
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * a - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0))


def cubic(size: int, output: int, align_corners: bool, scale: Scale) -> np.ndarray:
    """Return the matrix (output, size) of cubic interpolation."""
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
    """Return the matrix of a kernel that widens with the step where an axis shrinks."""
    step = _step_size(size, output, align_corners, scale)
    widening = max(step, 1.0)
    matrix = np.zeros((output, size))
    for i in range(output):
        center = step * (i + 0.5)
        begin = max(int(center - radius * widening + 0.5), 0)
        end = min(int(center + radius * widening + 0.5), size)
        weights = kernel((np.arange(begin, end) - center + 0.5) / widening)
        matrix[i, begin:end] = weights / (weights.sum() or 1)
    return matrix


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(x), 0)


linear_antialiased = functools.partial(_antialiased, _triangle, 1)
cubic_antialiased = functools.partial(_antialiased, functools.partial(_cubic, a=-0.5), 2)


def nearest(size: int, output: int, scale: Scale, offset: float) -> np.ndarray:
    """Return which input element each output element takes, (output,) int64.

    Args:
        size: length of the input axis.
        output: length of the resampled axis.
        scale: output elements an input element, where the caller names it.
        offset: 0, or 0.5 for `nearest-exact`.
    """
    # In float32, as torch computes it, which is off by one for some sizes.
    step = np.float32(1 / scale) if scale else np.float32(size) / np.float32(output)
    positions = np.floor((np.arange(output, dtype=np.float32) + np.float32(offset)) * step)
    return np.minimum(positions, size - 1).astype(np.int64)


def adaptive_windows(size: int, output: int) -> list[tuple[int, int]]:
    """Return (begin, end) of each adaptive window on an axis of `size` elements."""
    return [(i * size // output, -(-(i + 1) * size // output)) for i in range(output)]


def adaptive_average(size: int, output: int) -> np.ndarray:
    """Return the matrix (output, size) of adaptive averages: a row takes its window's mean."""
    matrix = np.zeros((output, size))
    for i, (begin, end) in enumerate(adaptive_windows(size, output)):
        matrix[i, begin:end] = 1 / (end - begin)
    return matrix


# torch's operation -> (the matrix of an axis, number of axes).
INTERPOLATIONS: dict[str, tuple[MatrixBuilder, int]] = {
    "upsample_linear1d": (linear, 1),
    "upsample_bilinear2d": (linear, 2),
    "upsample_trilinear3d": (linear, 3),
    "upsample_bicubic2d": (cubic, 2),
    "_upsample_bilinear2d_aa": (linear_antialiased, 2),
    "_upsample_bicubic2d_aa": (cubic_antialiased, 2),
}
# torch's operation -> (the offset of `nearest`, number of axes).
NEAREST: dict[str, tuple[float, int]] = {
    **{f"upsample_nearest{rank}d": (0.0, rank) for rank in (1, 2, 3)},
    **{f"_upsample_nearest_exact{rank}d": (0.5, rank) for rank in (1, 2, 3)},
}
