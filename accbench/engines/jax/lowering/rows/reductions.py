"""Reductions over axes. 16-bit floats are summed in float32 and rounded once."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from accbench.engines.jax.lowering.dtypes import int64_dtype, is_complex, opmath, to_floating
from accbench.engines.jax.lowering.table import lowering

Dims = int | Sequence[int] | None


def axes(array: Any, dim: Dims) -> tuple[int, ...]:
    """Return axes counted from 0; none named means all, as in torch."""
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return tuple(range(array.ndim))
    dims = (dim,) if isinstance(dim, int) else dim
    return tuple(d % array.ndim for d in dims) if array.ndim else ()


def count(array: Any, dim: Dims) -> int:
    """Return the number of elements that are reduced to one."""
    return math.prod(array.shape[d] for d in axes(array, dim))


def _sum_dtype(array: Any, dtype: Any) -> Any:
    if dtype is not None:
        return dtype
    is_integral = not jnp.issubdtype(array.dtype, jnp.inexact)
    return int64_dtype() if is_integral else jnp.dtype(array.dtype)


@lowering("aten.sum.default")
def sum_all(self: Any, dtype: Any = None) -> Any:
    return sum_(self, None, False, dtype)


@lowering("aten.sum.dim_IntList")
def sum_(self: Any, dim: Dims, keepdim: bool = False, dtype: Any = None) -> Any:
    dtype = _sum_dtype(self, dtype)
    return jnp.sum(self, axes(self, dim), opmath(dtype), keepdims=keepdim).astype(dtype)


@lowering("aten.mean.default")
def mean_all(self: Any, dtype: Any = None) -> Any:
    return mean(self, None, False, dtype)


@lowering("aten.mean.dim")
def mean(self: Any, dim: Dims, keepdim: bool = False, dtype: Any = None) -> Any:
    dtype = jnp.dtype(self.dtype if dtype is None else dtype)
    return jnp.mean(self, axes(self, dim), opmath(dtype), keepdims=keepdim).astype(dtype)


@lowering("aten.prod.default")
def prod_all(self: Any, dtype: Any = None) -> Any:
    dtype = _sum_dtype(self, dtype)
    return jnp.prod(self, dtype=opmath(dtype)).astype(dtype)


@lowering("aten.prod.dim_int")
def prod(self: Any, dim: int, keepdim: bool = False, dtype: Any = None) -> Any:
    dtype = _sum_dtype(self, dtype)
    return jnp.prod(self, axes(self, dim), opmath(dtype), keepdims=keepdim).astype(dtype)


@lowering("aten.amax.default")
def amax(self: Any, dim: Dims = (), keepdim: bool = False) -> Any:
    return jnp.max(self, axes(self, dim), keepdims=keepdim)


@lowering("aten.amin.default")
def amin(self: Any, dim: Dims = (), keepdim: bool = False) -> Any:
    return jnp.min(self, axes(self, dim), keepdims=keepdim)


@lowering("aten.max.default")
def max_all(self: Any) -> Any:
    return jnp.max(self)


@lowering("aten.min.default")
def min_all(self: Any) -> Any:
    return jnp.min(self)


def _arg(function: Callable[..., Any], self: Any, dim: int | None, keepdim: bool) -> Any:
    if not self.ndim:
        return jnp.zeros((), int64_dtype())
    if dim is None:
        index = function(self.reshape(-1)).astype(int64_dtype())
        return index.reshape((1,) * self.ndim) if keepdim else index
    return function(self, dim, keepdims=keepdim).astype(int64_dtype())


@lowering("aten.argmax.default")
def argmax(self: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return _arg(jnp.argmax, self, dim, keepdim)


@lowering("aten.argmin.default")
def argmin(self: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return _arg(jnp.argmin, self, dim, keepdim)


@lowering("aten.max.dim")
def max_dim(self: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    return amax(self, dim, keepdim), argmax(self, dim, keepdim)


@lowering("aten.min.dim")
def min_dim(self: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    return amin(self, dim, keepdim), argmin(self, dim, keepdim)


def _logical_dtype(self: Any) -> Any:
    """Return bool, but uint8 for uint8, as torch does."""
    return jnp.uint8 if self.dtype == jnp.uint8 else jnp.bool_


@lowering("aten.any.default", "aten.any.dim", "aten.any.dims")
def any_(self: Any, dim: Dims = None, keepdim: bool = False) -> Any:
    return jnp.any(self, axes(self, dim), keepdims=keepdim).astype(_logical_dtype(self))


@lowering("aten.all.default", "aten.all.dim", "aten.all.dims")
def all_(self: Any, dim: Dims = None, keepdim: bool = False) -> Any:
    return jnp.all(self, axes(self, dim), keepdims=keepdim).astype(_logical_dtype(self))


def moments(self: Any, dim: Dims, correction: Any, keepdim: bool) -> tuple[Any, Any]:
    """Return variance and mean in the compute dtype; `correction` 1 is the unbiased variance."""
    x = self.astype(opmath(self.dtype))
    over = axes(self, dim)
    mean = jnp.mean(x, over, keepdims=True)
    divisor = max(count(self, dim) - (1 if correction is None else correction), 0)
    squares = jnp.sum(jnp.square(x - mean), over, keepdims=keepdim)
    return squares / jnp.asarray(divisor, x.dtype), mean if keepdim else jnp.squeeze(mean, over)


@lowering("aten.var.correction")
def var(self: Any, dim: Dims = None, correction: Any = None, keepdim: bool = False) -> Any:
    return moments(self, dim, correction, keepdim)[0].astype(self.dtype)


@lowering("aten.var.dim")
def var_dim(self: Any, dim: Dims, unbiased: bool = True, keepdim: bool = False) -> Any:
    return var(self, dim, int(unbiased), keepdim)


@lowering("aten.var_mean.correction")
def var_mean(
    self: Any, dim: Dims = None, correction: Any = None, keepdim: bool = False
) -> tuple[Any, Any]:
    variance, mean = moments(self, dim, correction, keepdim)
    return variance.astype(self.dtype), mean.astype(self.dtype)


@lowering("aten.linalg_vector_norm.default")
def vector_norm(
    self: Any, ord: Any = 2, dim: Dims = None, keepdim: bool = False, dtype: Any = None
) -> Any:
    dtype = jnp.dtype(self.dtype if dtype is None else dtype)
    x, over = jnp.abs(self.astype(opmath(dtype))), axes(self, dim)  # real, also of complex numbers
    dtype = x.dtype if is_complex(dtype) else dtype
    if ord == math.inf:
        norm = jnp.max(x, over, keepdims=keepdim)
    elif ord == -math.inf:
        norm = jnp.min(x, over, keepdims=keepdim)
    elif ord == 0:
        norm = jnp.sum(x != 0, over, x.dtype, keepdims=keepdim)
    elif ord == 1:
        norm = jnp.sum(x, over, keepdims=keepdim)
    elif ord == 2:
        norm = jnp.sqrt(jnp.sum(jnp.square(x), over, keepdims=keepdim))
    else:
        norm = jnp.power(jnp.sum(jnp.power(x, ord), over, keepdims=keepdim), 1 / ord)
    return norm.astype(dtype)


def _scan(function: Callable[..., Any], self: Any, dim: int, dtype: Any) -> Any:
    dtype = _sum_dtype(self, dtype)
    if not self.ndim:
        return self.astype(dtype)
    return function(self.astype(opmath(dtype)), dim).astype(dtype)


@lowering("aten.cumsum.default")
def cumsum(self: Any, dim: int, dtype: Any = None) -> Any:
    return _scan(jnp.cumsum, self, dim, dtype)


@lowering("aten.cumprod.default")
def cumprod(self: Any, dim: int, dtype: Any = None) -> Any:
    return _scan(jnp.cumprod, self, dim, dtype)


@lowering("aten.logcumsumexp.default")
def logcumsumexp(self: Any, dim: int) -> Any:
    if not self.ndim:
        return self.astype(to_floating(self.dtype))
    x = self.astype(opmath(self.dtype))
    return lax.cumlogsumexp(x, dim % self.ndim).astype(self.dtype)


def _extreme_scan(better: Callable[..., Any], self: Any, dim: int) -> tuple[Any, Any]:
    """Return running extremes and their positions; of equal ones the last, as in torch."""
    if not self.ndim:
        return self, jnp.zeros((), int64_dtype())
    axis = dim % self.ndim
    positions = lax.broadcasted_iota(int64_dtype(), self.shape, axis)

    def best(a: Any, b: Any) -> Any:
        take_second = better(b[0], a[0]) | (b[0] != b[0])
        take_second = take_second & ~((a[0] != a[0]) & (b[0] == b[0]))
        return jnp.where(take_second, b[0], a[0]), jnp.where(take_second, b[1], a[1])

    return lax.associative_scan(best, (self, positions), axis=axis)


@lowering("aten.cummax.default")
def cummax(self: Any, dim: int) -> tuple[Any, Any]:
    return _extreme_scan(jnp.greater_equal, self, dim)


@lowering("aten.cummin.default")
def cummin(self: Any, dim: int) -> tuple[Any, Any]:
    return _extreme_scan(jnp.less_equal, self, dim)
