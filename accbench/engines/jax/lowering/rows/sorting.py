"""Sorting, and selection of the largest."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from accbench.engines.jax.lowering.dtypes import int64_dtype
from accbench.engines.jax.lowering.table import lowering


@lowering("aten.sort.default")
def sort(self: Any, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    """Return sorted values and where they were; equal ones keep their order."""
    if not self.ndim:
        return self, jnp.zeros((), int64_dtype())
    axis = dim % self.ndim
    order = jnp.argsort(self, axis=axis, stable=True, descending=descending)
    return jnp.take_along_axis(self, order, axis), order.astype(int64_dtype())


@lowering("aten.sort.stable")
def sort_stable(
    self: Any, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Any, Any]:
    return sort(self, dim, descending)


@lowering("aten.topk.default")
def topk(
    self: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Any, Any]:
    if not self.ndim:
        return self, jnp.zeros((), int64_dtype())
    values, order = sort(self, dim, largest)
    axis = dim % self.ndim
    return (
        lax.slice_in_dim(values, 0, k, axis=axis),
        lax.slice_in_dim(order, 0, k, axis=axis),
    )


@lowering("aten.kthvalue.default")
def kthvalue(self: Any, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    if not self.ndim:
        return self, jnp.zeros((), int64_dtype())
    axis = dim % self.ndim
    results = [lax.index_in_dim(a, k - 1, axis, keepdim) for a in sort(self, dim, False)]
    return results[0], results[1]


@lowering("aten.median.dim")
def median_dim(self: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    """Return the lower of two medians; NaN where there is one, as torch does."""
    if not self.ndim:
        return self, jnp.zeros((), int64_dtype())
    return _medians(self, dim, keepdim, skip_nan=False)


@lowering("aten.nanmedian.dim")
def nanmedian_dim(self: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    if not self.ndim:
        return self, jnp.zeros((), int64_dtype())
    return _medians(self, dim, keepdim, skip_nan=True)


@lowering("aten.median.default")
def median(self: Any) -> Any:
    return median_dim(self.reshape(-1), 0)[0]


@lowering("aten.nanmedian.default")
def nanmedian(self: Any) -> Any:
    return nanmedian_dim(self.reshape(-1), 0)[0]


def _medians(self: Any, dim: int, keepdim: bool, skip_nan: bool) -> tuple[Any, Any]:
    axis = dim % self.ndim
    nans = jnp.sum(self != self, axis, keepdims=True)
    num_numbers = self.shape[axis] - nans
    # NaNs are sorted to the end.
    middle = jnp.maximum(num_numbers - 1, 0) // 2
    if not skip_nan:
        middle = jnp.where(nans > 0, num_numbers, middle)
    results = [jnp.take_along_axis(a, middle, axis) for a in sort(self, axis)]
    if not keepdim:
        results = [jnp.squeeze(a, axis) for a in results]
    return results[0], results[1]
