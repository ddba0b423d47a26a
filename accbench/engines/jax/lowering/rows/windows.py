"""Sizes and slices of sliding windows, as torch counts them."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows over the last axes of an array, one number an axis in each field."""

    size: tuple[int, ...]
    """Of the array, without padding."""
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool

    @property
    def rank(self) -> int:
        return len(self.size)

    def reach(self, axis: int) -> int:
        """Elements from a window's first to its last, both counted."""
        return self.dilation[axis] * (self.kernel[axis] - 1) + 1

    def num(self, axis: int) -> int:
        """Windows along an axis; with `ceil_mode` the last may stick out, if it begins inside."""
        stride, padding = self.stride[axis], self.padding[axis]
        room = self.size[axis] + 2 * padding - self.reach(axis)
        if not self.ceil_mode:
            return room // stride + 1
        num = -(-room // stride) + 1
        return num - ((num - 1) * stride >= self.size[axis] + padding)

    def pads(self) -> list[tuple[int, int]]:
        """What must be added before and after each axis so that no window sticks out."""
        pads = []
        for axis, (size, padding) in enumerate(zip(self.size, self.padding, strict=True)):
            needed = (self.num(axis) - 1) * self.stride[axis] + self.reach(axis)
            pads.append((padding, max(needed - size - padding, 0)))
        return pads

    def parts(
        self, array: Any, fill: Any, trailing: int = 0
    ) -> Iterator[tuple[tuple[int, ...], Any]]:
        """For each place in the kernel, what the windows have there: (..., *num, ...).

        Args:
            trailing: axes of the array behind those of the windows.
        """
        before, after = array.ndim - self.rank - trailing, [0] * trailing
        value = jnp.asarray(fill, array.dtype)
        pads = [(0, 0, 0)] * before + [(*p, 0) for p in self.pads()] + [(0, 0, 0)] * trailing
        padded = lax.pad(array, value, pads)
        for place in itertools.product(*(range(k) for k in self.kernel)):
            begin = [p * d for p, d in zip(place, self.dilation, strict=True)]
            end = [b + (self.num(a) - 1) * self.stride[a] + 1 for a, b in enumerate(begin)]
            yield (
                place,
                lax.slice(
                    padded,
                    [0] * before + begin + after,
                    [*array.shape[:before], *end, *array.shape[array.ndim - trailing :]],
                    [1] * before + list(self.stride) + [1] * trailing,
                ),
            )


def windows(
    array: Any,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    rank: int,
) -> Windows:
    """torch's arguments of pooling, where one number stands for all axes, and no stride for the
    kernel's size."""

    def each(sizes: Sequence[int]) -> tuple[int, ...]:
        sizes = (sizes,) if isinstance(sizes, int) else sizes
        return tuple(sizes) * rank if len(sizes) == 1 else tuple(sizes)

    return Windows(
        size=tuple(array.shape[array.ndim - rank :]),
        kernel=each(kernel),
        stride=each(stride if len(stride) else kernel),
        padding=each(padding),
        dilation=each(dilation),
        ceil_mode=ceil_mode,
    )
