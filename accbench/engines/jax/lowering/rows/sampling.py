"""Reading images and volumes at places between their elements (`grid_sample`).

torch's `grid_sampler_*`: grid coordinates run from -1 to 1 over an axis, the last axis of the
grid naming x first. Modes are 0 linear, 1 nearest, 2 cubic; padding is 0 zeros, 1 border,
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


def _unnormalized(x: Any, size: int, align_corners: bool) -> Any:
    return (x + 1) / 2 * (size - 1) if align_corners else ((x + 1) * size - 1) / 2


def _reflected(x: Any, twice_low: int, twice_high: int) -> Any:
    if twice_low == twice_high:
        return jnp.zeros_like(x)
    low, span = twice_low / 2, (twice_high - twice_low) / 2
    x = jnp.abs(x - low)
    flips = jnp.floor(x / span)
    rest = x - lax.stop_gradient(flips) * span
    return jnp.where(flips % 2 == 0, rest, span - rest) + low


def _within(x: Any, size: int, padding: int, align_corners: bool) -> Any:
    """Coordinates brought into the image, as far as the padding mode does that."""
    if padding == REFLECTION:
        ends = (0, 2 * (size - 1)) if align_corners else (-1, 2 * size - 1)
        x = _reflected(x, *ends)
    if padding != ZEROS:
        # Not clip: torch gives no gradient at the very ends, and none beyond them.
        x = jnp.where((x > 0) & (x < size - 1), x, lax.stop_gradient(jnp.clip(x, 0, size - 1)))
    return x


def _read(image: Any, places: Sequence[Any]) -> Any:
    """Elements (N, C, *out) at whole places (N, *out), an array an axis; zeros outside."""
    sizes = image.shape[2:]
    inside = jnp.ones(places[0].shape, jnp.bool_)
    whole = []
    for place, size in zip(places, sizes, strict=True):
        inside = inside & (place >= 0) & (place <= size - 1)
        whole.append(jnp.clip(place, 0, size - 1).astype(jnp.int32))
    found = jax.vmap(lambda one, at: one[tuple([slice(None), *at])])(image, whole)
    return jnp.where(inside[:, None], found, 0)


def _cubic_weights(t: Any) -> list[Any]:
    a = -0.75

    def near(x: Any) -> Any:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Any) -> Any:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _sample(image: Any, grid: Any, mode: int, padding: int, align_corners: bool) -> Any:
    sizes = image.shape[2:]
    places = []
    for axis, size in enumerate(sizes):
        x = _unnormalized(grid[..., len(sizes) - 1 - axis], size, align_corners)
        places.append(x if mode == CUBIC else _within(x, size, padding, align_corners))
    if mode == NEAREST:
        return _read(image, [jnp.round(lax.stop_gradient(x)) for x in places])
    firsts = [lax.stop_gradient(jnp.floor(x)) for x in places]
    if mode == LINEAR:
        weights = [[1 - (x - f), x - f] for x, f in zip(places, firsts, strict=True)]
        begin = 0
    else:
        weights = [_cubic_weights(x - f) for x, f in zip(places, firsts, strict=True)]
        begin = -1
    total = 0.0
    for taps in itertools.product(range(len(weights[0])), repeat=len(sizes)):
        at = [f + tap + begin for f, tap in zip(firsts, taps, strict=True)]
        if mode == CUBIC:
            pairs = zip(at, sizes, strict=True)
            at = [jnp.round(_within(x, n, padding, align_corners)) for x, n in pairs]
        weight = 1.0
        for each, tap in zip(weights, taps, strict=True):
            weight = weight * each[tap]
        total = total + _read(image, at) * jnp.expand_dims(weight, 1)
    return total


@lowering("aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default")
def grid_sampler(
    input: Any, grid: Any, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Any:
    wide = opmath(input.dtype)
    how = (interpolation_mode, padding_mode, align_corners)
    return _sample(input.astype(wide), grid.astype(wide), *how).astype(input.dtype)


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
    how = (interpolation_mode, padding_mode, align_corners)

    def sample(image: Any, grid: Any) -> Any:
        return _sample(image, grid, *how)

    _, pull = jax.vjp(sample, input.astype(wide), grid.astype(wide))
    of_input, of_grid = pull(grad_output.astype(wide))
    return of_input.astype(input.dtype) if output_mask[0] else None, of_grid.astype(grid.dtype)
