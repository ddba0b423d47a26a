"""Pooling over one, two or three axes, and its gradients."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from accbench.engines.jax.lowering.context import Context
from accbench.engines.jax.lowering.dtypes import int64_dtype, is_floating, opmath
from accbench.engines.jax.lowering.rows.windows import WindowGeometry, window_geometry
from accbench.engines.jax.lowering.table import lowering
from accbench.engines.xla_common import resampling

Sizes = Sequence[int]
_MAX_KERNEL_SIZE = 64


def _lowest(dtype: Any) -> Any:
    return -np.inf if is_floating(dtype) else jnp.iinfo(dtype).min


def _size_of_axis(ndim: int, sizes: Sequence[Any], other: Any, trailing: int) -> tuple[Any, ...]:
    """Return a value for each axis: `sizes` for the pooled ones, `other` for the rest.

    The last `trailing` axes are not pooled.
    """
    return (other,) * (ndim - len(sizes) - trailing) + tuple(sizes) + (other,) * trailing


def window_max(x: Any, w: WindowGeometry, trailing: int = 0) -> Any:
    """Return the maximum of each window, over the axes before the last `trailing`.

    The literal -inf makes it differentiable in JAX.
    """
    return lax.reduce_window(
        x,
        _lowest(x.dtype),
        lax.max,
        _size_of_axis(x.ndim, w.kernel, 1, trailing),
        _size_of_axis(x.ndim, w.stride, 1, trailing),
        _size_of_axis(x.ndim, w.pads(), (0, 0), trailing),
        window_dilation=_size_of_axis(x.ndim, w.dilation, 1, trailing),
    )


def _argmax_in_plane(x: Any, w: WindowGeometry) -> Any:
    """Return the position of each window's maximum, counted over the pooled axes.

    Of equal elements the first counts, and a NaN before all.
    """
    best: Any = None
    positions: Any = None
    for position, values in w.kernel_slices(x, _lowest(x.dtype)):
        flat: Any = np.zeros((1,) * w.rank, np.int64)
        for axis in range(w.rank):
            coordinate: Any = np.arange(w.num(axis)) * w.stride[axis] - w.padding[axis]
            coordinate = (coordinate + position[axis] * w.dilation[axis]).reshape(
                [-1 if a == axis else 1 for a in range(w.rank)]
            )
            flat = flat * w.size[axis] + coordinate
            inside = (coordinate >= 0) & (coordinate < w.size[axis])
            flat = np.where(inside & (flat >= 0), flat, -1 << 20)
        current = jnp.broadcast_to(flat.astype(int64_dtype()), values.shape)
        if best is None:
            best, positions = values, current
            continue
        better = (values > best) | (values != values) | (positions < 0)
        better = better & (current >= 0)
        best, positions = jnp.where(better, values, best), jnp.where(better, current, positions)
    return positions


def window_max_grad(
    grad_output: Any, x: Any, w: WindowGeometry, by_position: bool, trailing: int = 0
) -> Any:
    """Return the gradient of `x` through `window_max`, for windows without dilation.

    Args:
        grad_output: of the windows' maxima.
        x: the input.
        w: its windows.
        by_position: find each window's first maximum, and add up a share for each position in the
            kernel. XLA fuses that; it runs its own operation, select-and-scatter, as loops on a
            CPU and with 32-bit positions on a GPU. Not for windows of more than 64 elements,
            which take XLA seconds to compile.
        trailing: number of axes behind the pooled ones.
    """
    if not by_position or math.prod(w.kernel) > _MAX_KERNEL_SIZE:
        # Finds the maxima again, so that no indices need to be saved.
        return jax.vjp(lambda x: window_max(x, w, trailing), x)[1](grad_output)[0]
    slices = list(w.kernel_slices(x, _lowest(x.dtype), trailing))
    # Searched again instead of compared with `window_max`: XLA may compute `x` twice, and round
    # differently.
    best = slices[0][1]
    argmax = jnp.zeros(best.shape, jnp.uint8)
    for index, (_, values) in enumerate(slices[1:], start=1):
        better = (values > best) | (values != values)
        best, argmax = jnp.where(better, values, best), jnp.where(better, jnp.uint8(index), argmax)
    before, pads = x.ndim - w.rank - trailing, w.pads()
    grads = grad_output.astype(opmath(x.dtype))
    total = jnp.zeros((), grads.dtype)
    for index, (position, _) in enumerate(slices):
        share = jnp.where(argmax == index, grads, jnp.zeros((), grads.dtype))
        # From the windows back to the elements; negative widths cut off what lies in padding.
        ends = []
        for axis in range(w.rank):
            begin = position[axis] * w.dilation[axis] - pads[axis][0]
            stride = w.stride[axis]
            end = begin + (w.num(axis) - 1) * stride + 1
            ends.append((begin, w.size[axis] - end, stride - 1))
        no_pad = (0, 0, 0)
        total += lax.pad(
            share, jnp.zeros((), grads.dtype), [no_pad] * before + ends + [no_pad] * trailing
        )
    if x.dtype == total.dtype:
        return total
    # Without it XLA, which removes pairs of casts, writes float32 for its readers.
    return lax.optimization_barrier(total.astype(x.dtype))


def _max_pool(rank: int) -> Any:
    def row(
        self: Any,
        kernel_size: Sizes,
        stride: Sizes = (),
        padding: Sizes = (0,),
        dilation: Sizes = (1,),
        ceil_mode: bool = False,
    ) -> tuple[Any, Any]:
        w = window_geometry(self, kernel_size, stride, padding, dilation, ceil_mode, rank)
        return window_max(self, w), _argmax_in_plane(self, w)

    return row


def _max_pool_backward(rank: int) -> Any:
    def row(
        context: Context,
        grad_output: Any,
        self: Any,
        kernel_size: Sizes,
        stride: Sizes,
        padding: Sizes,
        dilation: Sizes,
        ceil_mode: bool,
        indices: Any,
    ) -> Any:
        w = window_geometry(self, kernel_size, stride, padding, dilation, ceil_mode, rank)
        if set(w.dilation) == {1}:
            return window_max_grad(grad_output, self, w, context.rules.pools_by_place)
        return scatter_to_positions(grad_output, indices, self, rank)

    return row


def scatter_to_positions(grad_output: Any, indices: Any, like: Any, rank: int) -> Any:
    """Add up gradients at positions in planes; `like` has the result's shape and dtype."""
    leading = like.shape[: like.ndim - rank]
    planes = math.prod(leading)
    zeros = jnp.zeros((planes, math.prod(like.shape[like.ndim - rank :])), opmath(like.dtype))
    positions, grads = indices.reshape(planes, -1), grad_output.reshape(planes, -1)
    summed = zeros.at[jnp.arange(planes)[:, None], positions].add(grads.astype(zeros.dtype))
    return summed.reshape(like.shape).astype(like.dtype)


for _rank in (2, 3):
    _name = f"aten.max_pool{_rank}d_with_indices"
    lowering(f"{_name}.default")(_max_pool(_rank))
    lowering(f"{_name}_backward.default", context=True)(_max_pool_backward(_rank))


def window_mean(
    x: Any, w: WindowGeometry, count_include_pad: bool, divisor: int | None, trailing: int = 0
) -> Any:
    """Return the mean of each window, over the axes before the last `trailing`."""
    wide = x.astype(opmath(x.dtype))
    sums = lax.reduce_window(
        wide,
        np.zeros((), wide.dtype)[()],
        lax.add,
        _size_of_axis(x.ndim, w.kernel, 1, trailing),
        _size_of_axis(x.ndim, w.stride, 1, trailing),
        _size_of_axis(x.ndim, w.pads(), (0, 0), trailing),
    )
    counts = np.full((1,) * w.rank, divisor) if divisor else _counts(w, count_include_pad)
    counts = counts.reshape(counts.shape + (1,) * trailing)
    return (sums / jnp.asarray(counts, wide.dtype)).astype(x.dtype)


def window_mean_grad(
    grad_output: Any, x: Any, w: WindowGeometry, count_include_pad: bool, divisor: int | None,
    trailing: int = 0,
) -> Any:  # fmt: skip
    """Return the gradient of `x` through `window_mean`."""

    def average(x: Any) -> Any:
        return window_mean(x, w, count_include_pad, divisor, trailing)

    return jax.vjp(average, x)[1](grad_output)[0]


def _counts(w: WindowGeometry, count_include_pad: bool) -> Any:
    """Count the elements of each window: padding on request, what `ceil_mode` adds never."""
    counts = np.ones((1,) * w.rank)
    for axis in range(w.rank):
        begin = np.arange(w.num(axis)) * w.stride[axis] - w.padding[axis]
        end = np.minimum(begin + w.kernel[axis], w.size[axis] + w.padding[axis])
        if not count_include_pad:
            begin, end = np.maximum(begin, 0), np.minimum(end, w.size[axis])
        counts = counts * (end - begin).reshape([-1 if a == axis else 1 for a in range(w.rank)])
    return counts


def _avg_pool(rank: int) -> Any:
    def row(
        self: Any,
        kernel_size: Sizes,
        stride: Sizes = (),
        padding: Sizes = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        w = window_geometry(self, kernel_size, stride, padding, (1,), ceil_mode, rank)
        return window_mean(self, w, count_include_pad, divisor_override)

    return row


def _avg_pool_backward(rank: int) -> Any:
    def row(
        grad_output: Any,
        self: Any,
        kernel_size: Sizes,
        stride: Sizes,
        padding: Sizes,
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None,
    ) -> Any:
        w = window_geometry(self, kernel_size, stride, padding, (1,), ceil_mode, rank)
        return window_mean_grad(grad_output, self, w, count_include_pad, divisor_override)

    return row


for _rank in (1, 2, 3):
    lowering(f"aten.avg_pool{_rank}d.default")(_avg_pool(_rank))
for _rank in (2, 3):
    lowering(f"aten.avg_pool{_rank}d_backward.default")(_avg_pool_backward(_rank))


def apply_matrices(x: Any, matrices: Sequence[np.ndarray]) -> Any:
    """Multiply each of the last axes by a matrix (new, old), in float32."""
    wide = x.astype(opmath(x.dtype))
    for i, matrix in enumerate(matrices):
        axis = x.ndim - len(matrices) + i
        product = jnp.tensordot(
            wide, jnp.asarray(matrix, wide.dtype), ((axis,), (1,)), precision="highest"
        )
        wide = jnp.moveaxis(product, -1, axis)
    return wide.astype(x.dtype)


@lowering(
    "aten.adaptive_avg_pool1d.default",
    "aten._adaptive_avg_pool2d.default",
    "aten._adaptive_avg_pool3d.default",
)
def adaptive_avg_pool(self: Any, output_size: Sizes) -> Any:
    sizes = self.shape[self.ndim - len(output_size) :]
    if set(output_size) == {1}:
        over = tuple(range(self.ndim - len(output_size), self.ndim))
        return jnp.mean(self, over, opmath(self.dtype), keepdims=True).astype(self.dtype)
    pairs = zip(sizes, output_size, strict=True)
    return apply_matrices(self, [resampling.adaptive_average(n, m) for n, m in pairs])


def _adaptive_avg_backward(rank: int) -> Any:
    def row(grad_output: Any, self: Any) -> Any:
        old, new = self.shape[-rank:], grad_output.shape[-rank:]
        pairs = zip(old, new, strict=True)
        return apply_matrices(grad_output, [resampling.adaptive_average(n, m).T for n, m in pairs])

    return row


for _rank in (2, 3):
    lowering(f"aten._adaptive_avg_pool{_rank}d_backward.default")(_adaptive_avg_backward(_rank))


def _adaptive_max(rank: int) -> Any:
    def row(self: Any, output_size: Sizes) -> tuple[Any, Any]:
        """Return maxima and their positions.

        Windows of several lengths are filled up with their last element.
        """
        leading = self.ndim - rank
        x, sizes = self, self.shape[leading:]
        flat: Any = np.zeros((), np.int64)
        for axis, (size, output) in enumerate(zip(sizes, output_size, strict=True)):
            bounds = resampling.adaptive_windows(size, output)
            longest = max(end - begin for begin, end in bounds)
            indices = np.array([[min(b + j, e - 1) for j in range(longest)] for b, e in bounds])
            # Axes (out, in window) of this axis follow those of the axes before it.
            x = jnp.take(x, indices, axis=leading + 2 * axis)
            flat = flat[..., None, None] * size + indices
        order = [*range(leading), *range(leading, x.ndim, 2), *range(leading + 1, x.ndim, 2)]
        cells = jnp.transpose(x, order).reshape(*self.shape[:leading], *output_size, -1)
        order = [*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)]
        positions = flat.transpose(order).reshape(*output_size, -1).astype(int64_dtype())
        best = jnp.argmax(cells, -1, keepdims=True)
        index = jnp.take_along_axis(jnp.broadcast_to(positions, cells.shape), best, -1)
        return jnp.max(cells, -1), index[..., 0]

    return row


def _adaptive_max_backward(rank: int) -> Any:
    def row(grad_output: Any, self: Any, indices: Any) -> Any:
        return scatter_to_positions(grad_output, indices, self, rank)

    return row


for _rank in (2, 3):
    lowering(f"aten.adaptive_max_pool{_rank}d.default")(_adaptive_max(_rank))
    lowering(f"aten.adaptive_max_pool{_rank}d_backward.default")(_adaptive_max_backward(_rank))
