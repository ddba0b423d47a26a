"""Operations that run with channels last under the rule of that name: see `layout`."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from accbench.engines.jax.lowering.context import Context, Rules
from accbench.engines.jax.lowering.layout import (
    ChannelsLast,
    channels_last,
    channels_last_axis,
    to_channels_first,
    to_channels_last,
)
from accbench.engines.jax.lowering.rows import (
    gemm_convolution,
    normalization,
    pooling,
    reductions,
    shapes,
    torch_kernels,
    torch_norms,
)
from accbench.engines.jax.lowering.rows.convolution import (
    add_bias,
    bias_gradient,
    convolve,
    per_axis,
)
from accbench.engines.jax.lowering.rows.windows import window_geometry

Sizes = Sequence[int]


def _convolve(
    rules: Rules, x: Any, w: Any, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int
) -> Any:
    """Convolve x (N, *spatial, C) with w (out, C / groups, *kernel) -> (N, *spatial, out)."""
    rank = x.ndim - 2
    stride, padding = per_axis(stride, rank), per_axis(padding, rank)
    if rules.products_for_1x1 and math.prod(w.shape[2:]) == 1 and groups == 1 and not any(padding):
        x = x[(slice(None),) + tuple(slice(None, None, s) for s in stride)]
        matrix = w.reshape(w.shape[:2])
        rows = x.reshape(-1, x.shape[-1])
        product = lax.dot_general(rows, matrix, (((1,), (1,)), ((), ())))
        return product.reshape(*x.shape[:-1], w.shape[0])
    geometry = gemm_convolution.convolution_windows(x, w, stride, padding, per_axis(dilation, rank))
    if rules.products_for_patches and groups == 1 and gemm_convolution.are_patches(geometry):
        return gemm_convolution.convolve_patches(x, w, geometry)
    if rules.products_for_small_images and groups == 1 and gemm_convolution.is_small(geometry):
        return gemm_convolution.convolve(x, w, geometry)
    return convolve(x, w, stride, padding, dilation, groups, channels_last=True)


@channels_last("aten.convolution.default")
def convolution(
    context: Context,
    input: Any,
    weight: Any,
    bias: Any,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
) -> Any:
    conv_args = (stride, padding, dilation, transposed, output_padding, groups)
    n, c, *spatial = context.node.meta["val"].shape
    if torch_kernels.should_convolve(context, input, weight, (n, c, *spatial), conv_args):
        x, shape = to_channels_last(input), (n, *spatial, c)
        return ChannelsLast(
            torch_kernels.convolution(x, to_channels_first(weight), bias, shape, conv_args)
        )
    if transposed:
        return NotImplemented
    plain_args = (stride, padding, dilation, groups)
    y = _convolve(context.rules, to_channels_last(input), to_channels_first(weight), *plain_args)
    return ChannelsLast(add_bias(y, bias, channel_axis=-1))


@channels_last("aten.convolution_backward.default")
def convolution_backward(
    context: Context,
    grad_output: Any,
    input: Any,
    weight: Any,
    bias_sizes: Sizes | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
    output_mask: Sequence[bool],
) -> Any:
    conv_args = (stride, padding, dilation, transposed, output_padding, groups)
    by_torch = torch_kernels.should_convolve(context, input, weight, grad_output.shape, conv_args)
    if transposed and not by_torch:
        return NotImplemented
    g, x, w = to_channels_last(grad_output), to_channels_last(input), to_channels_first(weight)
    plain_args = (stride, padding, dilation, groups)
    input_grad = weight_grad = bias_grad = None
    if by_torch:
        input_grad, weight_grad = torch_kernels.convolution_backward(
            g, x, w, conv_args, output_mask[:2]
        )
        input_grad = None if input_grad is None else ChannelsLast(input_grad)
    elif output_mask[0]:
        pull = jax.vjp(lambda x: _convolve(context.rules, x, w, *plain_args), x)[1]
        input_grad = ChannelsLast(pull(g)[0])
    if output_mask[1] and not by_torch:
        sizes = (per_axis(size, x.ndim - 2) for size in (stride, padding, dilation))
        geometry = gemm_convolution.convolution_windows(x, w, *sizes)
        patches = context.rules.products_for_patches and gemm_convolution.are_patches(geometry)
        by_image = context.rules.weights_by_image and gemm_convolution.is_large(geometry)
        if by_image and groups == 1 and not patches:
            weight_grad = gemm_convolution.weight_gradient(x, g, geometry).astype(w.dtype)
        else:
            pull = jax.vjp(lambda w: _convolve(context.rules, x, w, *plain_args), w)[1]
            (weight_grad,) = pull(g)
    if output_mask[2]:
        bias_grad = bias_gradient(g, channel_axis=-1)
    return input_grad, weight_grad, bias_grad


@channels_last(
    "aten._native_batch_norm_legit_functional.default",
    "aten._native_batch_norm_legit.no_stats",
    "aten._native_batch_norm_legit_no_training.default",
    "aten._batch_norm_with_update_functional.default",
    "aten._batch_norm_no_update.default",
    "aten.native_batch_norm.default",
)
def batch_norm(context: Context, input: Any, *args: Any) -> Any:
    if not isinstance(input, ChannelsLast):
        return NotImplemented
    name = str(context.node.target)
    more = {"train": _train_function(context)} if name in normalization.TRAINING else {}
    y, *rest = normalization.BATCH_NORMS[name](input.array, *args, axis=-1, **more)
    return (ChannelsLast(y), *rest)


def _train_function(context: Context) -> normalization.Train:
    def train(
        x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: Any, *settings: Any
    ) -> Any:
        by_torch = torch_norms.should_normalize(context, x, weight, momentum, bias, mean, var)
        module = torch_norms if by_torch else normalization
        return module.batch_norm_train(x, weight, bias, mean, var, momentum, *settings)

    return train


@channels_last("aten.native_batch_norm_backward.default", "aten.batch_norm_backward.default")
def batch_norm_backward(context: Context, grad_out: Any, input: Any, *args: Any) -> Any:
    if not isinstance(input, ChannelsLast):
        return NotImplemented
    g, x = to_channels_last(grad_out), input.array
    weight, _, _, mean, invstd, train, eps, mask = args[:8]
    by_torch = torch_norms.should_normalize(context, x, weight, 0, mean, invstd)
    if train and by_torch and g.dtype == x.dtype:
        input_grad, *rest = torch_norms.batch_norm_backward(g, x, weight, mean, invstd, eps, mask)
    else:
        function = normalization.BATCH_NORMS[str(context.node.target)]
        input_grad, *rest = function(g, x, *args, axis=-1)
    return (None if input_grad is None else ChannelsLast(input_grad), *rest)


def _only_for_gradients(context: Context) -> bool:
    """Return whether only the backward uses the indices of this node's pooling."""
    picked = [u for u in context.node.users if u.args[1] == 1]
    return all("_backward" in str(user.target) for node in picked for user in node.users)


@channels_last("aten.max_pool2d_with_indices.default", "aten.max_pool3d_with_indices.default")
def max_pool(
    context: Context,
    self: Any,
    kernel_size: Sizes,
    stride: Sizes = (),
    padding: Sizes = (0,),
    dilation: Sizes = (1,),
    ceil_mode: bool = False,
) -> Any:
    w = window_geometry(self, kernel_size, stride, padding, dilation, ceil_mode, self.ndim - 2)
    is_channels_last = isinstance(self, ChannelsLast) and set(w.dilation) == {1}
    if not is_channels_last or not _only_for_gradients(context):
        return NotImplemented
    if torch_kernels.should_pool(context, self.array, w):
        return ChannelsLast(torch_kernels.window_max(self.array, w)), None
    return ChannelsLast(pooling.window_max(self.array, w, trailing=1)), None


@channels_last(
    "aten.max_pool2d_with_indices_backward.default",
    "aten.max_pool3d_with_indices_backward.default",
)
def max_pool_backward(
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
    w = window_geometry(self, kernel_size, stride, padding, dilation, ceil_mode, self.ndim - 2)
    if not isinstance(self, ChannelsLast) or set(w.dilation) != {1}:
        return NotImplemented
    if torch_kernels.should_pool(context, self.array, w):
        g = to_channels_last(grad_output)
        return ChannelsLast(torch_kernels.window_max_grad(g, self.array, w))
    g, by_position = to_channels_last(grad_output), context.rules.pools_by_place
    return ChannelsLast(pooling.window_max_grad(g, self.array, w, by_position, trailing=1))


@channels_last("aten.avg_pool2d.default", "aten.avg_pool3d.default")
def avg_pool(
    context: Context,
    self: Any,
    kernel_size: Sizes,
    stride: Sizes = (),
    padding: Sizes = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    if not isinstance(self, ChannelsLast):
        return NotImplemented
    w = window_geometry(self, kernel_size, stride, padding, (1,), ceil_mode, self.ndim - 2)
    y = pooling.window_mean(self.array, w, count_include_pad, divisor_override, trailing=1)
    return ChannelsLast(y)


@channels_last("aten.avg_pool2d_backward.default", "aten.avg_pool3d_backward.default")
def avg_pool_backward(
    context: Context,
    grad_output: Any,
    self: Any,
    kernel_size: Sizes,
    stride: Sizes,
    padding: Sizes,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Any:
    if not isinstance(self, ChannelsLast):
        return NotImplemented
    w = window_geometry(self, kernel_size, stride, padding, (1,), ceil_mode, self.ndim - 2)
    g = to_channels_last(grad_output)
    return ChannelsLast(
        pooling.window_mean_grad(g, self.array, w, count_include_pad, divisor_override, trailing=1)
    )


@channels_last("aten.mean.dim", "aten.sum.dim_IntList")
def reduction(
    context: Context, self: Any, dim: Any, keepdim: bool = False, dtype: Any = None
) -> Any:
    if not isinstance(self, ChannelsLast):
        return NotImplemented
    dims = reductions.axes(self, dim)
    remaining = [d for d in range(self.ndim) if d not in dims]
    if not keepdim and 1 in remaining and max(remaining) > 1:
        return NotImplemented  # the remaining axes would be in another order
    function = reductions.mean if "mean" in str(context.node.target) else reductions.sum_
    axes = [channels_last_axis(d, self.ndim) for d in dims]
    result = function(self.array, axes, keepdim, dtype)
    return ChannelsLast(result) if keepdim else result


@channels_last("aten._adaptive_avg_pool2d.default", "aten._adaptive_avg_pool3d.default")
def adaptive_avg_pool(context: Context, self: Any, output_size: Sizes) -> Any:
    if not isinstance(self, ChannelsLast) or set(output_size) != {1}:
        return NotImplemented
    spatial = tuple(range(1, self.ndim - 1))
    return ChannelsLast(reductions.mean(self.array, spatial, True))


@channels_last("aten.expand.default")
def expand(context: Context, self: Any, size: Sizes, implicit: bool = False) -> Any:
    """Expand an average's gradient to all positions, with channels last from there on."""
    is_channels_last = isinstance(self, ChannelsLast)
    if len(size) != self.ndim or len(size) != 4 or math.prod(self.shape[2:]) != 1:
        return NotImplemented
    if not is_channels_last and math.prod(size[2:]) == 1:
        return NotImplemented
    full = [n if m == -1 else m for n, m in zip(self.shape, size, strict=True)]
    return ChannelsLast(jnp.broadcast_to(to_channels_last(self), (full[0], *full[2:], full[1])))


@channels_last("aten.cat.default")
def cat(context: Context, tensors: Sequence[Any], dim: int = 0) -> Any:
    ndim = tensors[0].ndim
    if not any(isinstance(t, ChannelsLast) for t in tensors) or {t.ndim for t in tensors} != {ndim}:
        return NotImplemented
    return ChannelsLast(
        shapes.cat([to_channels_last(t) for t in tensors], channels_last_axis(dim, ndim))
    )


@channels_last("aten.slice.Tensor")
def slice_(
    context: Context, self: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    if not isinstance(self, ChannelsLast):
        return NotImplemented
    return ChannelsLast(
        shapes.slice_(self.array, channels_last_axis(dim, self.ndim), start, end, step)
    )


@channels_last("aten.split.Tensor", "aten.split_with_sizes.default")
def split(context: Context, self: Any, sizes: Any, dim: int = 0) -> Any:
    if not isinstance(self, ChannelsLast):
        return NotImplemented
    function = shapes.split if isinstance(sizes, int) else shapes.split_with_sizes
    return [
        ChannelsLast(a) for a in function(self.array, sizes, channels_last_axis(dim, self.ndim))
    ]


@channels_last("aten.constant_pad_nd.default")
def constant_pad_nd(context: Context, self: Any, pad: Sizes, value: Any = 0) -> Any:
    if not isinstance(self, ChannelsLast) or len(pad) > 2 * (self.ndim - 2):
        return NotImplemented
    return ChannelsLast(shapes.constant_pad_nd(self.array, [0, 0, *pad], value))


@channels_last("aten.permute.default")
def permute(context: Context, self: Any, dims: Sizes) -> Any:
    """Relabel the axes where a model itself asks for channels last, or back."""
    order = [d % self.ndim for d in dims]
    if isinstance(self, ChannelsLast) and order == [0, *range(2, self.ndim), 1]:
        return self.array
    if not isinstance(self, ChannelsLast) and self.ndim == 4 and order == [0, 3, 1, 2]:
        return ChannelsLast(self)
    return NotImplemented
