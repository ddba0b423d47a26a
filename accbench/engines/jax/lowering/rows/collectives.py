"""torch's functional collectives, as `accbench.distributed.collectives` has them.

A step runs over all ranks' devices: ranks that have parts of the same layers lie along the mesh's
axis `tp`, those that have parts of the same sequences along `cp`.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from accbench.engines.jax.lowering.table import lowering

TP_AXIS, CP_AXIS = "tp", "cp"
TOKEN_AXES = ("workers", CP_AXIS)
"""The axes of ranks with tokens of their own."""


@lowering("_c10d_functional.all_reduce.default")
def _all_reduce(input: Any, reduce_op: str, group_name: str) -> Any:
    if reduce_op != "sum":
        raise NotImplementedError(f"all_reduce by {reduce_op}")
    return lax.psum(input, TP_AXIS)


@lowering("_c10d_functional.all_gather_into_tensor.default")
def _all_gather_into_tensor(input: Any, group_size: int, group_name: str) -> Any:
    return lax.all_gather(input, TP_AXIS, axis=0, tiled=True)


@lowering("_c10d_functional.reduce_scatter_tensor.default")
def _reduce_scatter_tensor(input: Any, reduce_op: str, group_size: int, group_name: str) -> Any:
    if reduce_op != "sum":
        raise NotImplementedError(f"reduce_scatter_tensor by {reduce_op}")
    return lax.psum_scatter(input, TP_AXIS, scatter_dimension=0, tiled=True)


@lowering("_c10d_functional.all_to_all_single.default")
def _all_to_all_single(
    input: Any, output_split_sizes: Any, input_split_sizes: Any, group_name: str
) -> Any:
    if {*output_split_sizes, *input_split_sizes} != {1}:
        raise NotImplementedError("all_to_all_single of several rows")
    return lax.all_to_all(input, CP_AXIS, split_axis=0, concat_axis=0, tiled=True)


@lowering("_c10d_functional.wait_tensor.default")
def _wait_tensor(tensor: Any) -> Any:
    return tensor


@lowering("accbench.gather_weight.default")
def _gather_weight(shard: Any, after: Any, axis: int, dtype: Any) -> Any:
    """Gather a weight from its shards, not before the arrays in `after` are computed."""
    for array in after:
        shard = shard - computed_zero(array).astype(shard.dtype)
    return lax.all_gather(shard.astype(dtype or shard.dtype), TOKEN_AXES, axis=axis, tiled=True)


@lowering("accbench.reduce_gradient.default")
def _reduce_gradient(gradient: Any, axis: int) -> Any:
    """Return this rank's shard of the mean over ranks."""
    total = lax.psum_scatter(gradient, TOKEN_AXES, scatter_dimension=axis, tiled=True)
    return total / lax.psum(1, TOKEN_AXES)


def computed_zero(array: Any) -> Any:
    """Return a 0, uint32 (), that XLA cannot know before it has the array, whatever is in it."""
    first = array[(0,) * array.ndim]
    bits = lax.bitcast_convert_type(first, jnp.dtype(f"uint{8 * first.dtype.itemsize}"))
    return (bits.astype(jnp.uint32) & 0xFFFF) >> 16
