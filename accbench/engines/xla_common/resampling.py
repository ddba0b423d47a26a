"""Weights by which an axis is resampled as torch does it, made on the host."""

import functools
from collections.abc import Callable

import numpy as np

Scale = float | None
# (size, output, align_corners, scale) -> (output, size), for each output the weights of all inputs.
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


def nearest(size: int, output: int, scale: Scale, offset: float) -> np.ndarray:
    """Which input each output takes; `offset` is 0, or 0.5 for `nearest-exact`."""
    # In float32, as torch counts, which is off by one here and there.
    step = np.float32(1 / scale) if scale else np.float32(size) / np.float32(output)
    places = np.floor((np.arange(output, dtype=np.float32) + np.float32(offset)) * step)
    return np.minimum(places, size - 1).astype(np.int64)


def windows(size: int, output: int) -> list[tuple[int, int]]:
    """Where each of `output` adaptive windows begins and ends on an axis of `size` elements."""
    return [(i * size // output, -(-(i + 1) * size // output)) for i in range(output)]


def averaging(size: int, output: int) -> np.ndarray:
    """(output, size): a row takes the mean of its window."""
    matrix = np.zeros((output, size))
    for i, (begin, end) in enumerate(windows(size, output)):
        matrix[i, begin:end] = 1 / (end - begin)
    return matrix


# torch's operation -> what fills its axes, and how many there are of them.
MIXING: dict[str, tuple[Matrix, int]] = {
    "upsample_linear1d": (linear, 1),
    "upsample_bilinear2d": (linear, 2),
    "upsample_trilinear3d": (linear, 3),
    "upsample_bicubic2d": (cubic, 2),
    "_upsample_bilinear2d_aa": (linear_antialiased, 2),
    "_upsample_bicubic2d_aa": (cubic_antialiased, 2),
}
# torch's operation -> the offset of `nearest`, and how many axes.
PICKING: dict[str, tuple[float, int]] = {
    **{f"upsample_nearest{rank}d": (0.0, rank) for rank in (1, 2, 3)},
    **{f"_upsample_nearest_exact{rank}d": (0.5, rank) for rank in (1, 2, 3)},
}
