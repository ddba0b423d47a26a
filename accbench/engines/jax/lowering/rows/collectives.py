"""torch's functional collectives, as `accbench.distributed.collectives` has them.

A step runs over all ranks' devices: ranks that have parts of the same layers lie along the mesh's
axis `tp`, those that have parts of the same sequences along `cp`.
"""

from typing import Any

from jax import lax

from accbench.engines.jax.lowering.table import lowering

TP_AXIS, CP_AXIS = "tp", "cp"


@lowering("_c10d_functional.all_reduce.default")
def _all_reduce(input: Any, reduce_op: str, group_name: str) -> Any:
    if reduce_op != "sum":
        raise NotImplementedError(f"all_reduce by {reduce_op}")
    return lax.psum(input, TP_AXIS)


@lowering("_c10d_functional.all_gather_into_tensor.default")
def _all_gather_into_tensor(input: Any, group_size: int, group_name: str) -> Any:
    return lax.all_gather(input, TP_AXIS, axis=0, tiled=True)


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
