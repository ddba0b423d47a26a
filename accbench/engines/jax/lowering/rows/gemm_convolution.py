"""Convolutions as matrix products, channels last, where XLA's own are slow on a CPU.

XLA's convolutions are fast where Eigen's are made for the shape. They are slow for images of a few
pixels, and for the gradient of the weight, whose window is the whole image.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from accbench.engines.jax.lowering.dtypes import opmath
from accbench.engines.jax.lowering.rows.windows import WindowGeometry

# Larger kernels are left to XLA, for each position in the kernel is a slice of the image.
_MAX_KERNEL_SIZE = 64
# Numbers of output pixels, as measured (docs/measured.md): at most that many for `convolve`, and at
# least that many for `weight_gradient`.
_SMALL_PIXELS, _LARGE_PIXELS = 9, 128


def convolution_windows(
    x: Any, w: Any, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> WindowGeometry:
    """Return the windows of x (N, *spatial, C) under w (out, C, *kernel)."""
    sizes = tuple(stride), tuple(padding), tuple(dilation)
    return WindowGeometry(x.shape[1:-1], w.shape[2:], *sizes, ceil_mode=False)


def _num_pixels(windows: WindowGeometry) -> int:
    return math.prod(windows.num(axis) for axis in range(windows.rank))


def is_small(windows: WindowGeometry) -> bool:
    """Return whether `convolve` is faster than XLA's convolution."""
    return (
        0 < _num_pixels(windows) <= _SMALL_PIXELS and math.prod(windows.kernel) <= _MAX_KERNEL_SIZE
    )


def is_large(windows: WindowGeometry) -> bool:
    """Return whether `weight_gradient` is faster than XLA's convolution."""
    return (
        _num_pixels(windows) >= _LARGE_PIXELS and 1 < math.prod(windows.kernel) <= _MAX_KERNEL_SIZE
    )


def are_patches(windows: WindowGeometry) -> bool:
    """Return whether the windows lie side by side, without overlap or padding."""
    is_plain = not any(windows.padding) and set(windows.dilation) == {1}
    return is_plain and windows.kernel == windows.stride and _num_pixels(windows) > 0


def convolve_patches(x: Any, w: Any, windows: WindowGeometry) -> Any:
    """Convolve x (N, *spatial, C) with w (out, C, *kernel) by one product.

    Each element is in one window at most, so nothing is copied twice. Returns
    (N, *spatial, out).
    """
    rank, channels, out = windows.rank, x.shape[-1], w.shape[0]
    num = [windows.num(axis) for axis in range(rank)]
    covered = [n * k for n, k in zip(num, windows.kernel, strict=True)]
    x = lax.slice(x, [0] * x.ndim, [x.shape[0], *covered, channels])
    split_sizes = [size for pair in zip(num, windows.kernel, strict=True) for size in pair]
    x = x.reshape(x.shape[0], *split_sizes, channels)
    in_windows, in_kernel = range(1, 2 * rank, 2), range(2, 2 * rank + 1, 2)
    x = x.transpose(0, *in_windows, *in_kernel, 2 * rank + 1)
    columns = x.reshape(x.shape[0], *num, -1)
    rows = jnp.moveaxis(w, 1, -1).reshape(out, -1)
    return lax.dot_general(columns, rows, (((columns.ndim - 1,), (1,)), ((), ())))


def convolve(x: Any, w: Any, windows: WindowGeometry) -> Any:
    """Convolve x (N, *spatial, C) with w (out, C, *kernel) by one product."""
    slices = dict(windows.kernel_slices(x, 0, trailing=1))
    inside = [
        position
        for position in slices
        if all(map(_is_inside(windows), range(windows.rank), position))
    ]
    positions = inside or list(slices)
    columns = jnp.concatenate([slices[position] for position in positions], axis=-1)
    rows = jnp.concatenate(
        [w[(slice(None), slice(None)) + position] for position in positions], axis=1
    )
    return lax.dot_general(columns, rows, (((columns.ndim - 1,), (1,)), ((), ())))


def weight_gradient(x: Any, g: Any, windows: WindowGeometry) -> Any:
    """Compute the weight's gradient, (out, C, *kernel), by one product for each image.

    x is (N, *spatial, C), and the output's gradient g (N, *spatial, out). One image's columns
    fit into the processor's caches, where all images' do not.
    """
    wide = opmath(x.dtype)
    out, channels = g.shape[-1], x.shape[-1]

    def add(total: Any, image_and_grad: tuple[Any, Any]) -> tuple[Any, None]:
        image, gradient = image_and_grad
        columns = jnp.concatenate(
            [window_slice for _, window_slice in windows.kernel_slices(image, 0, 1)], axis=-1
        )
        left, right = gradient.reshape(-1, out), columns.reshape(-1, columns.shape[-1])
        product = lax.dot_general(
            left, right, (((0,), (0,)), ((), ())), preferred_element_type=wide
        )
        return total + product, None

    zeros = jnp.zeros((out, math.prod(windows.kernel) * channels), wide)
    total, _ = lax.scan(add, zeros, (x, g))
    return jnp.moveaxis(total.reshape(out, *windows.kernel, channels), -1, 1).astype(x.dtype)


def _is_inside(windows: WindowGeometry) -> Callable[[int, int], bool]:
    """Return a function: is a position in the kernel, along an axis, ever inside the image?"""

    def is_inside(axis: int, position: int) -> bool:
        stride = windows.stride[axis]
        first = position * windows.dilation[axis] - windows.padding[axis]
        at = range(first, first + windows.num(axis) * stride, stride)
        return any(0 <= position < windows.size[axis] for position in at)

    return is_inside
