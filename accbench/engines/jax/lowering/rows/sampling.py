"""Sampling of images and volumes at positions between their elements (`grid_sample`).

torch's `grid_sampler_*`: grid coordinates run from -1 to 1 over an axis, and the last axis of the
grid names x first. Modes are 0 linear, 1 nearest, 2 cubic; padding is 0 zeros, 1 border,
2 reflection.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from accbench.engines.jax.lowering.dtypes import opmath
from accbench.engines.jax.lowering.table import lowering

LINEAR, NEAREST, CUBIC = 0, 1, 2
ZEROS, BORDER, REFLECTION = 0, 1, 2


def _unnormalize(x: Any, size: int, align_corners: bool) -> Any:
    return (x + 1) / 2 * (size - 1) if align_corners else ((x + 1) * size - 1) / 2


def _reflect(x: Any, twice_low: int, twice_high: int) -> Any:
    if twice_low == twice_high:
        return jnp.zeros_like(x)
    low, span = twice_low / 2, (twice_high - twice_low) / 2
    x = jnp.abs(x - low)
    flips = jnp.floor(x / span)
    rest = x - lax.stop_gradient(flips) * span
    return jnp.where(flips % 2 == 0, rest, span - rest) + low


def _clip_or_reflect(x: Any, size: int, padding: int, align_corners: bool) -> Any:
    """Bring coordinates into the image, as far as the padding mode does that."""
    if padding == REFLECTION:
        ends = (0, 2 * (size - 1)) if align_corners else (-1, 2 * size - 1)
        x = _reflect(x, *ends)
    if padding != ZEROS:
        # Not clip: torch gives no gradient at the very ends, and none beyond them.
        x = jnp.where((x > 0) & (x < size - 1), x, lax.stop_gradient(jnp.clip(x, 0, size - 1)))
    return x


def _read(image: Any, coordinates: Sequence[Any]) -> Any:
    """Read elements (N, C, *out) at coordinates (N, *out), an array an axis; zeros outside."""
    sizes = image.shape[2:]
    inside = jnp.ones(coordinates[0].shape, jnp.bool_)
    indices = []
    for coordinate, size in zip(coordinates, sizes, strict=True):
        inside = inside & (coordinate >= 0) & (coordinate <= size - 1)
        indices.append(jnp.clip(coordinate, 0, size - 1).astype(jnp.int32))
    values = jax.vmap(lambda image, index: image[tuple([slice(None), *index])])(image, indices)
    return jnp.where(inside[:, None], values, 0)


def _cubic_weights(t: Any) -> list[Any]:
    a = -0.75

    def near(x: Any) -> Any:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Any) -> Any:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _sample(image: Any, grid: Any, mode: int, padding: int, align_corners: bool) -> Any:
    sizes = image.shape[2:]
    coordinates = []
    for axis, size in enumerate(sizes):
        x = _unnormalize(grid[..., len(sizes) - 1 - axis], size, align_corners)
        coordinates.append(
            x if mode == CUBIC else _clip_or_reflect(x, size, padding, align_corners)
        )
    if mode == NEAREST:
        return _read(image, [jnp.round(lax.stop_gradient(x)) for x in coordinates])
    floors = [lax.stop_gradient(jnp.floor(x)) for x in coordinates]
    if mode == LINEAR:
        weights = [[1 - (x - f), x - f] for x, f in zip(coordinates, floors, strict=True)]
        begin = 0
    else:
        weights = [_cubic_weights(x - f) for x, f in zip(coordinates, floors, strict=True)]
        begin = -1
    total = 0.0
    for taps in itertools.product(range(len(weights[0])), repeat=len(sizes)):
        corner = [f + tap + begin for f, tap in zip(floors, taps, strict=True)]
        if mode == CUBIC:
            pairs = zip(corner, sizes, strict=True)
            corner = [jnp.round(_clip_or_reflect(x, n, padding, align_corners)) for x, n in pairs]
        weight = 1.0
        for axis_weights, tap in zip(weights, taps, strict=True):
            weight = weight * axis_weights[tap]
        total = total + _read(image, corner) * jnp.expand_dims(weight, 1)
    return total


@lowering("aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default")
def grid_sampler(
    input: Any, grid: Any, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Any:
    wide = opmath(input.dtype)
    sample_args = (interpolation_mode, padding_mode, align_corners)
    return _sample(input.astype(wide), grid.astype(wide), *sample_args).astype(input.dtype)


@lowering("aten.grid_sampler_2d_backward.default", "aten.grid_sampler_3d_backward.default")
def grid_sampler_backward(
    grad_output: Any,
    input: Any,
    grid: Any,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[Any, Any]:
    wide = opmath(input.dtype)
    sample_args = (interpolation_mode, padding_mode, align_corners)

    def sample(image: Any, grid: Any) -> Any:
        return _sample(image, grid, *sample_args)

    _, pull = jax.vjp(sample, input.astype(wide), grid.astype(wide))
    input_grad, grid_grad = pull(grad_output.astype(wide))
    return input_grad.astype(input.dtype) if output_mask[0] else None, grid_grad.astype(grid.dtype)
