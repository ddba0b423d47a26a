"""torch's functional collectives, as they stand in models that tensor parallelism has cut.

A step runs over all ranks' devices; collectives of its graph are over the mesh's axis `tp`.
"""

from typing import Any

from jax import lax

from accbench.engines.jax.lowering.table import lowering

TP_AXIS = "tp"
"""The mesh's axis along which ranks have parts of the same layers."""


@lowering("_c10d_functional.all_reduce.default")
def _all_reduce(input: Any, reduce_op: str, group_name: str) -> Any:
    if reduce_op != "sum":
        raise NotImplementedError(f"all_reduce by {reduce_op}")
    return lax.psum(input, TP_AXIS)


@lowering("_c10d_functional.all_gather_into_tensor.default")
def _all_gather_into_tensor(input: Any, group_size: int, group_name: str) -> Any:
    return lax.all_gather(input, TP_AXIS, axis=0, tiled=True)


@lowering("_c10d_functional.wait_tensor.default")
def _wait_tensor(tensor: Any) -> Any:
    return tensor
