"""Tensors that are created. What torch leaves uninitialized is zeros."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from accbench.engines.jax.lowering.dtypes import dtype_of_number, int64_dtype
from accbench.engines.jax.lowering.table import lowering


@lowering("aten.full.default")
def full(size: Sequence[int], fill_value: Any, dtype: Any = None) -> Any:
    return jnp.full(size, fill_value, dtype_of_number(fill_value) if dtype is None else dtype)


@lowering("aten.full_like.default")
def full_like(self: Any, fill_value: Any, dtype: Any = None) -> Any:
    return jnp.full(self.shape, fill_value, self.dtype if dtype is None else dtype)


@lowering("aten.new_full.default")
def new_full(self: Any, size: Sequence[int], fill_value: Any, dtype: Any = None) -> Any:
    return jnp.full(size, fill_value, self.dtype if dtype is None else dtype)


@lowering("aten.zeros_like.default", "aten.empty_like.default")
def zeros_like(self: Any, dtype: Any = None) -> Any:
    return jnp.zeros(self.shape, self.dtype if dtype is None else dtype)


@lowering("aten.ones_like.default")
def ones_like(self: Any, dtype: Any = None) -> Any:
    return jnp.ones(self.shape, self.dtype if dtype is None else dtype)


@lowering(
    "aten.zeros.default",
    "aten.empty.memory_format",
    "aten.empty_strided.default",
    "aten.empty_permuted.default",
)
def zeros(size: Sequence[int], order: Any = None, dtype: Any = None) -> Any:
    return jnp.zeros(size, jnp.float32 if dtype is None else dtype)


@lowering("aten.ones.default")
def ones(size: Sequence[int], dtype: Any = None) -> Any:
    return jnp.ones(size, jnp.float32 if dtype is None else dtype)


@lowering("aten.new_zeros.default", "aten.new_empty.default", "aten.new_empty_strided.default")
def new_zeros(self: Any, size: Sequence[int], stride: Any = None, dtype: Any = None) -> Any:
    return jnp.zeros(size, self.dtype if dtype is None else dtype)


@lowering("aten.new_ones.default")
def new_ones(self: Any, size: Sequence[int], dtype: Any = None) -> Any:
    return jnp.ones(size, self.dtype if dtype is None else dtype)


@lowering("aten.scalar_tensor.default")
def scalar_tensor(s: Any, dtype: Any = None) -> Any:
    return jnp.asarray(s, jnp.float32 if dtype is None else dtype)


@lowering("aten.arange.default")
def arange(end: Any, dtype: Any = None) -> Any:
    return arange_step(0, end, 1, dtype)


@lowering("aten.arange.start")
def arange_start(start: Any, end: Any, dtype: Any = None) -> Any:
    return arange_step(start, end, 1, dtype)


@lowering("aten.arange.start_step")
def arange_step(start: Any, end: Any, step: Any = 1, dtype: Any = None) -> Any:
    """Compute a range in float64 or int64 on the host, as torch does, and round once."""
    is_integral = all(isinstance(n, int) for n in (start, end, step))
    if dtype is None:
        dtype = int64_dtype() if is_integral else jnp.dtype(jnp.float32)
    length = max(
        -(-(end - start) // step) if is_integral else int(np.ceil((end - start) / step)), 0
    )
    values = start + np.arange(length, dtype=np.int64 if is_integral else np.float64) * step
    return jnp.asarray(values.astype(dtype))


@lowering("aten.linspace.default")
def linspace(start: Any, end: Any, steps: int, dtype: Any = None) -> Any:
    values = np.linspace(start, end, steps, dtype=np.float64)
    dtype = jnp.dtype(jnp.float32 if dtype is None else dtype)
    return jnp.asarray((np.trunc(values) if dtype.kind in "iu" else values).astype(dtype))


@lowering("aten.eye.default")
def eye(n: int, dtype: Any = None) -> Any:
    return jnp.eye(n, dtype=jnp.float32 if dtype is None else dtype)


@lowering("aten.eye.m")
def eye_m(n: int, m: int, dtype: Any = None) -> Any:
    return jnp.eye(n, m, dtype=jnp.float32 if dtype is None else dtype)


@lowering("prims.iota.default")
def iota(length: int, start: int, step: int, dtype: Any, requires_grad: bool = False) -> Any:
    return arange_step(start, start + length * step, step, dtype)
