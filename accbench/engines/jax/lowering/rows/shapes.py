"""Shapes: operations that move, repeat or pick elements by position, whatever they hold."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from accbench.engines.jax.lowering.context import Context
from accbench.engines.jax.lowering.dtypes import result_type
from accbench.engines.jax.lowering.table import lowering


def axis_slice(ndim: int, dim: int, part: Any) -> tuple[Any, ...]:
    """Return an index that takes `part` of one axis and all of the axes before it."""
    return (slice(None),) * (dim % max(ndim, 1)) + (part,)


@lowering(
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.reshape.default",
    "aten.view_copy.default",
    "aten._reshape_alias.default",
)
def view(self: Any, size: Sequence[int], stride: Any = None) -> Any:
    return self.reshape(size)


@lowering("aten.view.dtype", "aten.view_copy.dtype")
def view_dtype(self: Any, dtype: Any) -> Any:
    """Reinterpret the same bytes as another dtype.

    The last axis grows or shrinks by the ratio of sizes.
    """
    old, new = self.dtype.itemsize, jnp.dtype(dtype).itemsize
    if new > old:
        self = self.reshape(*self.shape[:-1], self.shape[-1] // (new // old), new // old)
    bits = lax.bitcast_convert_type(self, dtype)
    return bits.reshape(*bits.shape[:-2], -1) if new < old else bits


@lowering("aten.permute.default", "aten.permute_copy.default")
def permute(self: Any, dims: Sequence[int]) -> Any:
    return jnp.transpose(self, [d % self.ndim for d in dims])


@lowering("aten.t.default")
def t(self: Any) -> Any:
    return self.T


@lowering("aten.transpose.int")
def transpose(self: Any, dim0: int, dim1: int) -> Any:
    return jnp.swapaxes(self, dim0, dim1) if self.ndim else self


@lowering("aten.unsqueeze.default")
def unsqueeze(self: Any, dim: int) -> Any:
    return jnp.expand_dims(self, dim)


@lowering("aten.squeeze.default")
def squeeze(self: Any) -> Any:
    return jnp.squeeze(self)


@lowering("aten.squeeze.dim", "aten.squeeze.dims")
def squeeze_dims(self: Any, dim: int | Sequence[int]) -> Any:
    dims = (dim,) if isinstance(dim, int) else dim
    if not self.ndim:
        return self
    return jnp.squeeze(self, tuple({d % self.ndim for d in dims if self.shape[d] == 1}))


@lowering("aten.expand.default", "aten.expand_copy.default")
def expand(self: Any, size: Sequence[int], implicit: bool = False) -> Any:
    new = len(size) - self.ndim
    return jnp.broadcast_to(
        self, [self.shape[i - new] if n == -1 else n for i, n in enumerate(size)]
    )


@lowering("aten.repeat.default")
def repeat(self: Any, repeats: Sequence[int]) -> Any:
    return jnp.tile(self.reshape((1,) * (len(repeats) - self.ndim) + self.shape), repeats)


@lowering("aten.slice.Tensor", "aten.slice_copy.Tensor")
def slice_(
    self: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    return self[axis_slice(self.ndim, dim, slice(start, end, step))]


@lowering("aten.slice_scatter.default")
def slice_scatter(
    self: Any,
    src: Any,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    index = axis_slice(self.ndim, dim, slice(start, end, step))
    return self.at[index].set(src.astype(self.dtype))


@lowering("aten.slice_backward.default")
def slice_backward(
    grad_output: Any, input_sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Any:
    num, size = grad_output.shape[dim], input_sizes[dim]
    if not num:
        return jnp.zeros(input_sizes, grad_output.dtype)
    before, _, _ = slice(start, end, step).indices(size)
    # Padding, also between elements: a GPU would otherwise scatter where the step is not 1.
    padding = [(0, 0, 0)] * grad_output.ndim
    padding[dim] = (before, size - before - (num - 1) * step - 1, step - 1)
    return lax.pad(grad_output, jnp.zeros((), grad_output.dtype), padding)


@lowering("aten.select.int", "aten.select_copy.int")
def select(self: Any, dim: int, index: int) -> Any:
    return lax.index_in_dim(self, index, dim % self.ndim, keepdims=False)


@lowering("aten.select_scatter.default")
def select_scatter(self: Any, src: Any, dim: int, index: int) -> Any:
    return self.at[axis_slice(self.ndim, dim, index)].set(src.astype(self.dtype))


@lowering("aten.select_backward.default")
def select_backward(grad_output: Any, input_sizes: Sequence[int], dim: int, index: int) -> Any:
    return select_scatter(jnp.zeros(input_sizes, grad_output.dtype), grad_output, dim, index)


@lowering("aten.cat.default")
def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate in the promoted dtype; empty 1-d tensors count for nothing, as in torch."""
    dtype = result_type(*tensors)
    arrays = [t.astype(dtype) for t in tensors if t.shape != (0,)]
    return jnp.concatenate(arrays, dim) if arrays else jnp.zeros((0,), dtype)


@lowering("aten.stack.default")
def stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    dtype = result_type(*tensors)
    return jnp.stack([t.astype(dtype) for t in tensors], dim)


def _split_at(self: Any, ends: list[int], dim: int) -> list[Any]:
    begins = [0, *ends[:-1]]
    return [
        lax.slice_in_dim(self, begin, end, axis=dim % self.ndim)
        for begin, end in zip(begins, ends, strict=True)
    ]


@lowering("aten.split.Tensor", "aten.unsafe_split.Tensor")
def split(self: Any, split_size: int, dim: int = 0) -> list[Any]:
    length = self.shape[dim]
    ends = [*range(split_size, length, split_size), length] if length else [0]
    return _split_at(self, ends, dim)


@lowering("aten.split_with_sizes.default", "aten.unsafe_split_with_sizes.default")
def split_with_sizes(self: Any, split_sizes: Sequence[int], dim: int = 0) -> list[Any]:
    return _split_at(self, [*itertools.accumulate(split_sizes)], dim)


@lowering("aten.unbind.int")
def unbind(self: Any, dim: int = 0) -> list[Any]:
    return [select(self, dim, i) for i in range(self.shape[dim])]


@lowering("aten.constant_pad_nd.default")
def constant_pad_nd(self: Any, pad: Sequence[int], value: Any = 0) -> Any:
    """Pad by `pad`, two numbers an axis from the last axis on; negative ones cut off."""
    num_axes = len(pad) // 2
    widths = [(0, 0, 0)] * (self.ndim - num_axes)
    widths += [(pad[2 * i], pad[2 * i + 1], 0) for i in reversed(range(num_axes))]
    return lax.pad(self, jnp.asarray(value, self.dtype), widths)


@lowering("aten.flip.default")
def flip(self: Any, dims: Sequence[int]) -> Any:
    return jnp.flip(self, tuple(dims)) if self.ndim else self


@lowering("aten.roll.default")
def roll(self: Any, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    if not dims:
        return jnp.roll(self.reshape(-1), shifts[0]).reshape(self.shape)
    return jnp.roll(self, tuple(shifts), tuple(dims)) if self.ndim else self


@lowering("aten.tril.default")
def tril(self: Any, diagonal: int = 0) -> Any:
    return jnp.tril(self, diagonal)


@lowering("aten.triu.default")
def triu(self: Any, diagonal: int = 0) -> Any:
    return jnp.triu(self, diagonal)


@lowering("aten.diagonal.default", "aten.diagonal_copy.default")
def diagonal(self: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    return jnp.diagonal(self, offset, dim1, dim2)


@lowering("aten.diagonal_scatter.default")
def diagonal_scatter(self: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    matrices = jnp.moveaxis(self, (dim1, dim2), (-2, -1))
    rows = np.arange(src.shape[-1]) + max(-offset, 0)
    columns = np.arange(src.shape[-1]) + max(offset, 0)
    matrices = matrices.at[..., rows, columns].set(src.astype(self.dtype))
    return jnp.moveaxis(matrices, (-2, -1), (dim1, dim2))


@lowering("aten.diagonal_backward.default")
def diagonal_backward(
    grad_output: Any, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> Any:
    zeros = jnp.zeros(input_sizes, grad_output.dtype)
    return diagonal_scatter(zeros, grad_output, offset, dim1, dim2)


@lowering("aten.unfold.default", "aten.unfold_copy.default")
def unfold(self: Any, dimension: int, size: int, step: int) -> Any:
    """Return the windows of one axis; their elements come in a new last axis."""
    if not self.ndim:
        return self.reshape(1)[:size]
    dim = dimension % self.ndim
    begins = np.arange((self.shape[dim] - size) // step + 1) * step
    windows = jnp.take(self, begins[:, None] + np.arange(size)[None], axis=dim)
    return jnp.moveaxis(windows, dim + 1, -1)


def _storage_positions(size: Sequence[int], stride: Sequence[int], offset: int) -> np.ndarray:
    """Return where each element of a strided tensor lies in its storage."""
    positions = np.full(tuple(size), offset)
    for axis, (n, step) in enumerate(zip(size, stride, strict=True)):
        positions = positions + (np.arange(n) * step).reshape(-1, *[1] * (len(size) - axis - 1))
    return positions


def _storage_order(context: Context, ndim: int) -> list[int]:
    """Return the axes of a row's first argument from the slowest in storage to the fastest.

    Strided tensors of a graph fill their storage densely; channels_last is one.
    """
    value = context.node.args[0].meta.get("val") if context.node is not None else None
    if value is None or value.is_contiguous():
        return [*range(ndim)]
    return sorted(range(ndim), key=lambda axis: -value.stride(axis))


@lowering("aten.as_strided.default", "aten.as_strided_copy.default", context=True)
def as_strided(
    context: Context,
    self: Any,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Any:
    """Pick elements by position in torch's storage, for which the input's strides count."""
    order = _storage_order(context, self.ndim)
    is_plain = not storage_offset and tuple(stride) == _contiguous(size)
    if is_plain and order == sorted(order) and math.prod(size) == self.size:
        return self.reshape(size)
    storage = jnp.transpose(self, order).reshape(-1)
    return jnp.take(storage, _storage_positions(size, stride, storage_offset or 0), axis=0)


@lowering("aten.as_strided_scatter.default", context=True)
def as_strided_scatter(
    context: Context,
    self: Any,
    src: Any,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Any:
    order = _storage_order(context, self.ndim)
    ordered = jnp.transpose(self, order)
    positions = _storage_positions(size, stride, storage_offset or 0)
    storage = ordered.reshape(-1).at[positions].set(src.astype(self.dtype))
    return jnp.transpose(
        storage.reshape(ordered.shape), [order.index(axis) for axis in range(self.ndim)]
    )


def _contiguous(size: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(size[i + 1 :]) for i in range(len(size)))


@lowering("aten.pixel_shuffle.default")
def pixel_shuffle(self: Any, upscale_factor: int) -> Any:
    *batch, c, h, w = self.shape
    r = upscale_factor
    parts = self.reshape(*batch, c // (r * r), r, r, h, w)
    n = len(batch)
    order = (*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return parts.transpose(order).reshape(*batch, c // (r * r), h * r, w * r)


@lowering("aten.pixel_unshuffle.default")
def pixel_unshuffle(self: Any, downscale_factor: int) -> Any:
    *batch, c, h, w = self.shape
    r = downscale_factor
    parts = self.reshape(*batch, c, h // r, r, w // r, r)
    n = len(batch)
    order = (*range(n), n, n + 2, n + 4, n + 1, n + 3)
    return parts.transpose(order).reshape(*batch, c * r * r, h // r, w // r)


@lowering("aten.sym_size.int")
def sym_size(self: Any, dim: int) -> int:
    return self.shape[dim]


@lowering("aten.sym_numel.default")
def sym_numel(self: Any) -> int:
    return self.size


@lowering("aten.sym_is_contiguous.default")  # a core operation of torch 2.11
def sym_is_contiguous(self: Any, memory_format: Any = None) -> bool:
    return True  # JAX's arrays have no strides


@lowering(
    "aten._assert_tensor_metadata.default",
    "aten._assert_async.default",
    "aten._assert_async.msg",
    "aten._assert_scalar.default",
    "aten.sym_constrain_range_for_size.default",
)
def skip_assertion(*args: Any, **kwargs: Any) -> None:
    """Skip an assertion, which held while the graph was captured with these shapes."""
