"""Sizes and slices of sliding windows, as torch counts them."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class WindowGeometry:
    """Windows over the last axes of an array; each field has one number for each axis."""

    size: tuple[int, ...]
    """The array's, without padding."""
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool

    @property
    def rank(self) -> int:
        return len(self.size)

    def extent(self, axis: int) -> int:
        """Return the number of elements from a window's first to its last, both counted."""
        return self.dilation[axis] * (self.kernel[axis] - 1) + 1

    def num(self, axis: int) -> int:
        """Return the number of windows along an axis.

        With `ceil_mode` the last may reach beyond the end, if it begins inside.
        """
        stride, padding = self.stride[axis], self.padding[axis]
        last_start = self.size[axis] + 2 * padding - self.extent(axis)
        if not self.ceil_mode:
            return last_start // stride + 1
        num = -(-last_start // stride) + 1
        return num - ((num - 1) * stride >= self.size[axis] + padding)

    def pads(self) -> list[tuple[int, int]]:
        """Return the padding before and after each axis, so that every window fits."""
        pads = []
        for axis, (size, padding) in enumerate(zip(self.size, self.padding, strict=True)):
            needed = (self.num(axis) - 1) * self.stride[axis] + self.extent(axis)
            pads.append((padding, max(needed - size - padding, 0)))
        return pads

    def kernel_slices(
        self, array: Any, fill: Any, trailing: int = 0
    ) -> Iterator[tuple[tuple[int, ...], Any]]:
        """Yield each position in the kernel, and what the windows have there: (..., *num, ...).

        Args:
            array: (..., *size, ...).
            fill: the value of padding.
            trailing: number of axes of the array behind those of the windows.
        """
        before, zeros = array.ndim - self.rank - trailing, [0] * trailing
        value = jnp.asarray(fill, array.dtype)
        pads = [(0, 0, 0)] * before + [(*p, 0) for p in self.pads()] + [(0, 0, 0)] * trailing
        padded = lax.pad(array, value, pads)
        for position in itertools.product(*(range(k) for k in self.kernel)):
            begin = [p * d for p, d in zip(position, self.dilation, strict=True)]
            end = [b + (self.num(a) - 1) * self.stride[a] + 1 for a, b in enumerate(begin)]
            yield (
                position,
                lax.slice(
                    padded,
                    [0] * before + begin + zeros,
                    [*array.shape[:before], *end, *array.shape[array.ndim - trailing :]],
                    [1] * before + list(self.stride) + [1] * trailing,
                ),
            )


def window_geometry(
    array: Any,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    rank: int,
) -> WindowGeometry:
    """Return the geometry of torch's pooling arguments.

    There one number stands for all axes, and an empty stride for the kernel's size.
    """

    def each(sizes: Sequence[int]) -> tuple[int, ...]:
        sizes = (sizes,) if isinstance(sizes, int) else sizes
        return tuple(sizes) * rank if len(sizes) == 1 else tuple(sizes)

    return WindowGeometry(
        size=tuple(array.shape[array.ndim - rank :]),
        kernel=each(kernel),
        stride=each(stride if len(stride) else kernel),
        padding=each(padding),
        dilation=each(dilation),
        ceil_mode=ceil_mode,
    )
