"""Gathering and scattering elements by tensors of indices.

torch raises where an index is out of range. A compiled graph cannot raise: JAX takes the nearest
element, and drops what would be placed outside.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from accbench.engines.jax.lowering.dtypes import int64_dtype, opmath, result_type
from accbench.engines.jax.lowering.table import lowering
from accbench.errors import RequestError


def _grid(index: Any, dim: int) -> tuple[Any, ...]:
    """Return an index of every axis: `index` along `dim`, its own position along all others."""
    parts = []
    for axis, size in enumerate(index.shape):
        if axis == dim % index.ndim:
            parts.append(index)
        else:
            parts.append(
                jnp.arange(size).reshape([-1 if a == axis else 1 for a in range(index.ndim)])
            )
    return tuple(parts)


def _at_least_1d(*arrays: Any) -> list[Any]:
    return [a.reshape(1) if hasattr(a, "ndim") and not a.ndim else a for a in arrays]


@lowering("aten.gather.default")
def gather(self: Any, dim: int, index: Any, sparse_grad: bool = False) -> Any:
    source, positions = _at_least_1d(self, index)
    return source[_grid(positions, dim)].reshape(index.shape)


def _scatter(self: Any, dim: int, index: Any, src: Any, update: str) -> Any:
    """Update `self` by `src` at `index` along `dim`.

    `src` may be larger than `index`, as in torch. `update` is a method of JAX's `.at`.
    """
    target, positions, values = _at_least_1d(self, index, jnp.asarray(src, self.dtype))
    if jnp.ndim(src):
        values = values[tuple(slice(n) for n in positions.shape)]
    elif positions.ndim != 1 or positions.size != 1:
        values = values.reshape(())
    wide = target if update == "set" else target.astype(opmath(target.dtype))
    scattered = getattr(wide.at[_grid(positions, dim)], update)(values.astype(wide.dtype))
    return scattered.astype(self.dtype).reshape(self.shape)


@lowering("aten.scatter.src", "aten.scatter.value")
def scatter(self: Any, dim: int, index: Any, src: Any) -> Any:
    return _scatter(self, dim, index, src, "set")


@lowering("aten.scatter.reduce", "aten.scatter.value_reduce")
def scatter_with(self: Any, dim: int, index: Any, src: Any, reduce: str) -> Any:
    return _scatter(self, dim, index, src, {"add": "add", "multiply": "multiply"}[reduce])


@lowering("aten.scatter_add.default")
def scatter_add(self: Any, dim: int, index: Any, src: Any) -> Any:
    return _scatter(self, dim, index, src, "add")


@lowering("aten.scatter_reduce.two")
def scatter_reduce(
    self: Any, dim: int, index: Any, src: Any, reduce: str, include_self: bool = True
) -> Any:
    """Reduce all values that go to a position, and on request what was there."""
    update = {"sum": "add", "mean": "add", "prod": "multiply", "amax": "max", "amin": "min"}[reduce]
    wide = self.astype(opmath(self.dtype))
    source = src.astype(wide.dtype)
    touched = _scatter(jnp.zeros(self.shape, jnp.int32), dim, index, jnp.ones((), jnp.int32), "add")
    if not include_self:
        wide = jnp.where(touched > 0, _neutral(reduce, wide.dtype), wide)
    result = _scatter(wide, dim, index, source, update)
    if reduce == "mean":
        counts = jnp.maximum(touched + include_self, 1).astype(wide.dtype)
        is_integral = not jnp.issubdtype(wide.dtype, jnp.floating)
        result = jnp.floor_divide(result, counts) if is_integral else result / counts
    return result.astype(self.dtype)


def _neutral(reduce: str, dtype: Any) -> Any:
    if reduce in ("amax", "amin"):
        if jnp.issubdtype(dtype, jnp.floating):
            value: Any = -jnp.inf if reduce == "amax" else jnp.inf
        elif dtype == jnp.bool_:
            value = reduce == "amin"
        else:
            limits = jnp.iinfo(dtype)
            value = limits.min if reduce == "amax" else limits.max
    else:
        value = 1 if reduce == "prod" else 0
    return jnp.asarray(value, dtype)


def _refuse_masks(indices: Sequence[Any]) -> None:
    if any(i is not None and i.dtype == jnp.bool_ for i in indices):
        raise RequestError(
            "picking by a mask of bools gives a size that depends on the data, which a compiled "
            "graph cannot have; torch.where(mask, a, b) does"
        )


def _index(indices: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(slice(None) if i is None else i for i in indices)


@lowering("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index_(self: Any, indices: Sequence[Any]) -> Any:
    _refuse_masks(indices)
    return self[_index(indices)]


@lowering("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(self: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    if len(indices) == 1 and indices[0].dtype == jnp.bool_ and values.size == 1:
        mask = indices[0].reshape(indices[0].shape + (1,) * (self.ndim - indices[0].ndim))
        value = values.reshape(()).astype(self.dtype)
        return jnp.where(mask, self + value if accumulate else value, self)
    _refuse_masks(indices)
    if not accumulate:
        return self.at[_index(indices)].set(values.astype(self.dtype))
    wide = self.astype(opmath(self.dtype))
    return wide.at[_index(indices)].add(values.astype(wide.dtype)).astype(self.dtype)


@lowering("aten.put.default")
def put(self: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    """Set elements by positions in the flattened tensor."""
    positions = [index.reshape(-1)]
    return index_put(self.reshape(-1), positions, source.reshape(-1), accumulate).reshape(
        self.shape
    )


@lowering("aten.index_select.default")
def index_select(self: Any, dim: int, index: Any) -> Any:
    if not self.ndim:
        return self
    return jnp.take(self, index.reshape(-1), axis=dim, mode="clip")


@lowering("aten.index_add.default")
def index_add(self: Any, dim: int, index: Any, source: Any, alpha: Any = 1) -> Any:
    target, positions, values = _at_least_1d(self, index, source)
    wide = target.astype(opmath(target.dtype))
    added = values.astype(wide.dtype)
    added = added if alpha == 1 else added * jnp.asarray(alpha, wide.dtype)
    index_tuple = (slice(None),) * (dim % target.ndim) + (positions,)
    return wide.at[index_tuple].add(added).astype(self.dtype).reshape(self.shape)


@lowering("aten.masked_scatter.default")
def masked_scatter(self: Any, mask: Any, source: Any) -> Any:
    """Set the elements of `source`, one after the other, where the mask is set."""
    shape = jnp.broadcast_shapes(self.shape, mask.shape)
    self, mask = jnp.broadcast_to(self, shape), jnp.broadcast_to(mask, shape)
    order = jnp.cumsum(mask.reshape(-1)) - 1
    taken = jnp.take(source.reshape(-1), order, mode="clip").reshape(shape)
    return jnp.where(mask, taken.astype(self.dtype), self)


@lowering("aten.masked_scatter_backward.default")
def masked_scatter_backward(grad_output: Any, mask: Any, sizes: Sequence[int]) -> Any:
    """Return the gradient of `source`: the masked elements in order, then zeros."""
    mask = jnp.broadcast_to(mask, grad_output.shape).reshape(-1)
    size = math.prod(sizes)
    positions = jnp.where(mask, jnp.cumsum(mask) - 1, size)
    zeros = jnp.zeros((size,), grad_output.dtype)
    return zeros.at[positions].set(grad_output.reshape(-1), mode="drop").reshape(sizes)


@lowering("aten.embedding.default")
def embedding(
    weight: Any,
    indices: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    return jnp.take(weight, indices, axis=0, mode="clip")


@lowering("aten.embedding_dense_backward.default")
def embedding_backward(
    grad_output: Any,
    indices: Any,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Any:
    """Sum (..., width) into (num_weights, width); nothing for `padding_idx`."""
    width = grad_output.shape[-1]
    rows = indices.reshape(-1)
    grads = grad_output.reshape(-1, width).astype(opmath(grad_output.dtype))
    if padding_idx >= 0:
        grads = jnp.where((rows == padding_idx)[:, None], 0, grads)
    if scale_grad_by_freq:
        counts = jnp.zeros((num_weights,), grads.dtype).at[rows].add(1)
        grads = grads / counts[rows][:, None]
    zeros = jnp.zeros((num_weights, width), grads.dtype)
    return zeros.at[rows].add(grads).astype(grad_output.dtype)


@lowering("aten.searchsorted.Tensor")
def searchsorted(
    sorted_sequence: Any,
    self: Any,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    if sorter is not None or sorted_sequence.ndim != 1:
        raise RequestError("searchsorted is lowered for one sorted row, without a sorter")
    dtype = result_type(sorted_sequence, self)
    side = "right" if right or side == "right" else "left"
    positions = jnp.searchsorted(sorted_sequence.astype(dtype), self.astype(dtype), side)
    return positions.astype(jnp.int32 if out_int32 else int64_dtype())
