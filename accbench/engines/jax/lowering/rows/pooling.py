"""Pooling over one, two or three axes, and its gradients."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from accbench.engines.jax.lowering.context import Context
from accbench.engines.jax.lowering.dtypes import is_floating, opmath, wide_int
from accbench.engines.jax.lowering.rows.windows import Windows, windows
from accbench.engines.jax.lowering.table import lowering
from accbench.engines.xla_common import resampling

Sizes = Sequence[int]
_MOST_PLACES = 64


def _lowest(dtype: Any) -> Any:
    return -np.inf if is_floating(dtype) else jnp.iinfo(dtype).min


def _whole(ndim: int, sizes: Sequence[Any], other: Any, after: int) -> tuple[Any, ...]:
    """A value for each axis: `other` for those that aren't pooled, `after` of them the last."""
    return (other,) * (ndim - len(sizes) - after) + tuple(sizes) + (other,) * after


def largest(x: Any, w: Windows, after: int = 0) -> Any:
    """The largest of each window, over the axes before the `after` last.

    The literal -inf makes it differentiable in JAX.
    """
    return lax.reduce_window(
        x,
        _lowest(x.dtype),
        lax.max,
        _whole(x.ndim, w.kernel, 1, after),
        _whole(x.ndim, w.stride, 1, after),
        _whole(x.ndim, w.pads(), (0, 0), after),
        window_dilation=_whole(x.ndim, w.dilation, 1, after),
    )


def _largest_places(x: Any, w: Windows) -> Any:
    """Where each window's largest stands in its plane, counted over the pooled axes; of equal
    ones the first, and a NaN before all."""
    best: Any = None
    places: Any = None
    for place, values in w.parts(x, _lowest(x.dtype)):
        flat: Any = np.zeros((1,) * w.rank, np.int64)
        for axis in range(w.rank):
            along: Any = np.arange(w.num(axis)) * w.stride[axis] - w.padding[axis]
            along = (along + place[axis] * w.dilation[axis]).reshape(
                [-1 if a == axis else 1 for a in range(w.rank)]
            )
            flat = flat * w.size[axis] + along
            inside = (along >= 0) & (along < w.size[axis])
            flat = np.where(inside & (flat >= 0), flat, -1 << 20)
        here = jnp.broadcast_to(flat.astype(wide_int()), values.shape)
        if best is None:
            best, places = values, here
            continue
        better = (values > best) | (values != values) | (places < 0)
        better = better & (here >= 0)
        best, places = jnp.where(better, values, best), jnp.where(better, here, places)
    return places


def gradient_of_largest(
    grad_output: Any, x: Any, w: Windows, by_place: bool, after: int = 0
) -> Any:
    """What reaches `x` through `largest`; windows without dilation.

    Args:
        by_place: ask each window for the place of its first largest element, and add up a share
            for each place of the kernel: XLA fuses that, and has its operation for the whole,
            select-and-scatter, as loops on a CPU and with 32-bit places on a GPU. Not in windows
            of more than 64 places, which take XLA seconds to compile.
    """
    if not by_place or math.prod(w.kernel) > _MOST_PLACES:
        # By the windows again, so that nobody needs the indices.
        return jax.vjp(lambda x: largest(x, w, after), x)[1](grad_output)[0]
    seen = list(w.parts(x, _lowest(x.dtype), after))
    # Found anew, and not as what equals `largest`: XLA may compute `x` twice, and round otherwise.
    best = seen[0][1]
    won = jnp.zeros(best.shape, jnp.uint8)
    for number, (_, values) in enumerate(seen[1:], start=1):
        better = (values > best) | (values != values)
        best, won = jnp.where(better, values, best), jnp.where(better, jnp.uint8(number), won)
    before, pads = x.ndim - w.rank - after, w.pads()
    grads = grad_output.astype(opmath(x.dtype))
    total = jnp.zeros((), grads.dtype)
    for number, (place, _) in enumerate(seen):
        share = jnp.where(won == number, grads, jnp.zeros((), grads.dtype))
        # From the windows back to the elements: padding that a window has no place for is cut off.
        ends = []
        for axis in range(w.rank):
            begin = place[axis] * w.dilation[axis] - pads[axis][0]
            stride = w.stride[axis]
            end = begin + (w.num(axis) - 1) * stride + 1
            ends.append((begin, w.size[axis] - end, stride - 1))
        none = (0, 0, 0)
        total += lax.pad(share, jnp.zeros((), grads.dtype), [none] * before + ends + [none] * after)
    if x.dtype == total.dtype:
        return total
    # Or XLA, which takes pairs of casts away, writes it in float32 for those that read it so.
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
        w = windows(self, kernel_size, stride, padding, dilation, ceil_mode, rank)
        return largest(self, w), _largest_places(self, w)

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
        w = windows(self, kernel_size, stride, padding, dilation, ceil_mode, rank)
        if set(w.dilation) == {1}:
            return gradient_of_largest(grad_output, self, w, context.rules.pools_by_place)
        return scatter_to_places(grad_output, indices, self, rank)

    return row


def scatter_to_places(grad_output: Any, indices: Any, like: Any, rank: int) -> Any:
    """Gradients added up at places in planes; `like` has the result's shape and dtype."""
    leading = like.shape[: like.ndim - rank]
    planes = math.prod(leading)
    zeros = jnp.zeros((planes, math.prod(like.shape[like.ndim - rank :])), opmath(like.dtype))
    places, grads = indices.reshape(planes, -1), grad_output.reshape(planes, -1)
    summed = zeros.at[jnp.arange(planes)[:, None], places].add(grads.astype(zeros.dtype))
    return summed.reshape(like.shape).astype(like.dtype)


for _rank in (2, 3):
    _name = f"aten.max_pool{_rank}d_with_indices"
    lowering(f"{_name}.default")(_max_pool(_rank))
    lowering(f"{_name}_backward.default", context=True)(_max_pool_backward(_rank))


def averaged(
    x: Any, w: Windows, count_include_pad: bool, divisor: int | None, after: int = 0
) -> Any:
    wide = x.astype(opmath(x.dtype))
    sums = lax.reduce_window(
        wide,
        np.zeros((), wide.dtype)[()],
        lax.add,
        _whole(x.ndim, w.kernel, 1, after),
        _whole(x.ndim, w.stride, 1, after),
        _whole(x.ndim, w.pads(), (0, 0), after),
    )
    counts = np.full((1,) * w.rank, divisor) if divisor else _counts(w, count_include_pad)
    counts = counts.reshape(counts.shape + (1,) * after)
    return (sums / jnp.asarray(counts, wide.dtype)).astype(x.dtype)


def _counts(w: Windows, count_include_pad: bool) -> Any:
    """Elements in each window. Padding counts on request, what `ceil_mode` adds never."""
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
        w = windows(self, kernel_size, stride, padding, (1,), ceil_mode, rank)
        return averaged(self, w, count_include_pad, divisor_override)

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
        w = windows(self, kernel_size, stride, padding, (1,), ceil_mode, rank)

        def average(x: Any) -> Any:
            return averaged(x, w, count_include_pad, divisor_override)

        return jax.vjp(average, self)[1](grad_output)[0]

    return row


for _rank in (1, 2, 3):
    lowering(f"aten.avg_pool{_rank}d.default")(_avg_pool(_rank))
for _rank in (2, 3):
    lowering(f"aten.avg_pool{_rank}d_backward.default")(_avg_pool_backward(_rank))


def along_axes(x: Any, matrices: Sequence[np.ndarray]) -> Any:
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
    return along_axes(self, [resampling.adaptive_average(n, m) for n, m in pairs])


def _adaptive_avg_backward(rank: int) -> Any:
    def row(grad_output: Any, self: Any) -> Any:
        old, new = self.shape[-rank:], grad_output.shape[-rank:]
        pairs = zip(old, new, strict=True)
        return along_axes(grad_output, [resampling.adaptive_average(n, m).T for n, m in pairs])

    return row


for _rank in (2, 3):
    lowering(f"aten._adaptive_avg_pool{_rank}d_backward.default")(_adaptive_avg_backward(_rank))


def _adaptive_max(rank: int) -> Any:
    def row(self: Any, output_size: Sizes) -> tuple[Any, Any]:
        """Largest and their places: windows of several lengths are filled up with their first."""
        leading = self.ndim - rank
        x, sizes = self, self.shape[leading:]
        flat: Any = np.zeros((), np.int64)
        for axis, (size, output) in enumerate(zip(sizes, output_size, strict=True)):
            bounds = resampling.adaptive_windows(size, output)
            longest = max(end - begin for begin, end in bounds)
            taken = np.array([[min(b + j, e - 1) for j in range(longest)] for b, e in bounds])
            # Axes (out, in window) of this axis follow those of the axes before it.
            x = jnp.take(x, taken, axis=leading + 2 * axis)
            flat = flat[..., None, None] * size + taken
        order = [*range(leading), *range(leading, x.ndim, 2), *range(leading + 1, x.ndim, 2)]
        cells = jnp.transpose(x, order).reshape(*self.shape[:leading], *output_size, -1)
        order = [*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)]
        places = flat.transpose(order).reshape(*output_size, -1).astype(wide_int())
        best = jnp.argmax(cells, -1, keepdims=True)
        index = jnp.take_along_axis(jnp.broadcast_to(places, cells.shape), best, -1)
        return jnp.max(cells, -1), index[..., 0]

    return row


def _adaptive_max_backward(rank: int) -> Any:
    def row(grad_output: Any, self: Any, indices: Any) -> Any:
        return scatter_to_places(grad_output, indices, self, rank)

    return row


for _rank in (2, 3):
    lowering(f"aten.adaptive_max_pool{_rank}d.default")(_adaptive_max(_rank))
    lowering(f"aten.adaptive_max_pool{_rank}d_backward.default")(_adaptive_max_backward(_rank))
