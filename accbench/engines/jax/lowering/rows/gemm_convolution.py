"""Convolutions as products of matrices, channels last, where XLA on a CPU has nothing better.

Its convolutions are fast where Eigen's are made for the shape. They are not for images of a few
pixels, and for the gradient of the weight, whose window is the whole image.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from accbench.engines.jax.lowering.dtypes import opmath
from accbench.engines.jax.lowering.rows.windows import Windows

# Kernels of more places than that are left to XLA, for each place is a slice of the image.
_MOST_PLACES = 64
# Of output pixels, as measured (docs/measured.md): at most so many for all of a convolution, and at
# least so many for its weight's gradient.
_FEW, _MANY = 9, 128


def windows_of(
    x: Any, w: Any, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Windows:
    """Of x (N, *spatial, C) under w (out, C, *kernel)."""
    sizes = tuple(stride), tuple(padding), tuple(dilation)
    return Windows(x.shape[1:-1], w.shape[2:], *sizes, ceil_mode=False)


def _num_pixels(windows: Windows) -> int:
    return math.prod(windows.num(axis) for axis in range(windows.rank))


def is_small(windows: Windows) -> bool:
    """Whether `convolve` is the faster way."""
    return 0 < _num_pixels(windows) <= _FEW and math.prod(windows.kernel) <= _MOST_PLACES


def is_large(windows: Windows) -> bool:
    """Whether `weight_gradient` is the faster way."""
    return _num_pixels(windows) >= _MANY and 1 < math.prod(windows.kernel) <= _MOST_PLACES


def are_patches(windows: Windows) -> bool:
    """Whether the windows lie side by side, so that each element is in one of them at most."""
    plain = not any(windows.padding) and set(windows.dilation) == {1}
    return plain and windows.kernel == windows.stride and _num_pixels(windows) > 0


def convolve_patches(x: Any, w: Any, windows: Windows) -> Any:
    """x (N, *spatial, C), w (out, C, *kernel) -> (N, *spatial, out): one product, nothing copied
    twice, whatever the number of places."""
    rank, channels, out = windows.rank, x.shape[-1], w.shape[0]
    num = [windows.num(axis) for axis in range(rank)]
    covered = [n * k for n, k in zip(num, windows.kernel, strict=True)]
    x = lax.slice(x, [0] * x.ndim, [x.shape[0], *covered, channels])
    apart = [size for pair in zip(num, windows.kernel, strict=True) for size in pair]
    x = x.reshape(x.shape[0], *apart, channels)
    in_windows, in_kernel = range(1, 2 * rank, 2), range(2, 2 * rank + 1, 2)
    x = x.transpose(0, *in_windows, *in_kernel, 2 * rank + 1)
    columns = x.reshape(x.shape[0], *num, -1)
    rows = jnp.moveaxis(w, 1, -1).reshape(out, -1)
    return lax.dot_general(columns, rows, (((columns.ndim - 1,), (1,)), ((), ())))


def convolve(x: Any, w: Any, windows: Windows) -> Any:
    """x (N, *spatial, C), w (out, C, *kernel) -> (N, *spatial, out): one product."""
    parts = dict(windows.parts(x, 0, trailing=1))
    seen = [place for place in parts if all(map(_sees(windows), range(windows.rank), place))]
    places = seen or list(parts)
    columns = jnp.concatenate([parts[place] for place in places], axis=-1)
    rows = jnp.concatenate([w[(slice(None), slice(None)) + place] for place in places], axis=1)
    return lax.dot_general(columns, rows, (((columns.ndim - 1,), (1,)), ((), ())))


def weight_gradient(x: Any, g: Any, windows: Windows) -> Any:
    """x (N, *spatial, C) and the output's gradient g (N, *spatial, out) -> (out, C, *kernel).

    A product an image, whose columns fit into the processor's caches where all images' do not.
    """
    wide = opmath(x.dtype)
    out, channels = g.shape[-1], x.shape[-1]

    def add(total: Any, of_image: tuple[Any, Any]) -> tuple[Any, None]:
        image, gradient = of_image
        columns = jnp.concatenate([part for _, part in windows.parts(image, 0, 1)], axis=-1)
        left, right = gradient.reshape(-1, out), columns.reshape(-1, columns.shape[-1])
        product = lax.dot_general(
            left, right, (((0,), (0,)), ((), ())), preferred_element_type=wide
        )
        return total + product, None

    zeros = jnp.zeros((out, math.prod(windows.kernel) * channels), wide)
    total, _ = lax.scan(add, zeros, (x, g))
    return jnp.moveaxis(total.reshape(out, *windows.kernel, channels), -1, 1).astype(x.dtype)


def _sees(windows: Windows) -> Callable[[int, int], bool]:
    """Of an axis and a place in the kernel: whether that is ever over more than padding."""

    def sees(axis: int, place: int) -> bool:
        stride = windows.stride[axis]
        first = place * windows.dilation[axis] - windows.padding[axis]
        at = range(first, first + windows.num(axis) * stride, stride)
        return any(0 <= position < windows.size[axis] for position in at)

    return sees
