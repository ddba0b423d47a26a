"""Convolutions over one, two or three axes, plain and transposed, and their gradients."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from accbench.engines.jax.lowering.dtypes import opmath
from accbench.engines.jax.lowering.table import lowering

Sizes = Sequence[int]


def convolve(
    x: Any, w: Any, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int,
    channels_last: bool = False,
) -> Any:  # fmt: skip
    """Convolve x (N, C, *spatial) with w (out, C / groups, *kernel) -> (N, out, *spatial).

    With `channels_last`, x and the result are (N, *spatial, channels).
    """
    rank, dimension_numbers = x.ndim - 2, None
    if channels_last:
        spatial = "DHW"[3 - rank :]
        dimension_numbers = f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"
        w = jnp.moveaxis(w, (0, 1), (-1, -2))
    return lax.conv_general_dilated(
        x,
        w,
        window_strides=per_axis(stride, rank),
        padding=[(p, p) for p in per_axis(padding, rank)],
        rhs_dilation=per_axis(dilation, rank),
        feature_group_count=groups,
        dimension_numbers=dimension_numbers,
    )


def convolve_transposed(
    x: Any,
    w: Any,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    output_padding: Sizes,
    groups: int,
) -> Any:
    """Convolve x (N, C, *spatial) transposed, with w (C, out / groups, *kernel).

    It is the gradient of a convolution with respect to its input: a plain convolution of the
    dilated input with the mirrored kernel. Returns (N, out, *spatial).
    """
    kernel, rank = w.shape[2:], x.ndim - 2
    w = w.reshape(groups, w.shape[0] // groups, *w.shape[1:]).swapaxes(1, 2)
    w = jnp.flip(w.reshape(-1, *w.shape[2:]), range(2, 2 + len(kernel)))
    extents = [d * (k - 1) for d, k in zip(per_axis(dilation, rank), kernel, strict=True)]
    pads = zip(extents, per_axis(padding, rank), per_axis(output_padding, rank), strict=True)
    return lax.conv_general_dilated(
        x,
        w,
        window_strides=(1,) * len(kernel),
        padding=[(r - p, r - p + extra) for r, p, extra in pads],
        lhs_dilation=per_axis(stride, rank),
        rhs_dilation=per_axis(dilation, rank),
        feature_group_count=groups,
    )


def per_axis(sizes: Sizes, rank: int) -> tuple[int, ...]:
    """Return one size for each of `rank` axes; torch allows one for all."""
    return tuple(sizes) * rank if len(sizes) == 1 else tuple(sizes)


def add_bias(y: Any, bias: Any, channel_axis: int = 1) -> Any:
    """Add a bias (channels,), or None, to y in the precision of sums."""
    if bias is None:
        return y
    wide = opmath(y.dtype)
    per_channel = bias.astype(wide).reshape(-1, *[1] * (y.ndim - 1 - channel_axis % y.ndim))
    return (y.astype(wide) + per_channel).astype(y.dtype)


def bias_gradient(g: Any, channel_axis: int = 1) -> Any:
    """Sum the gradient of a convolution's result over all axes but the channels'."""
    others = tuple(axis for axis in range(g.ndim) if axis != channel_axis % g.ndim)
    return jnp.sum(g, others, opmath(g.dtype)).astype(g.dtype)


def _apply(
    x: Any,
    w: Any,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
) -> Any:
    if transposed:
        return convolve_transposed(x, w, stride, padding, dilation, output_padding, groups)
    return convolve(x, w, stride, padding, dilation, groups)


@lowering("aten.convolution.default")
def convolution(
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
    return add_bias(_apply(input, weight, *conv_args), bias)


@lowering("aten.convolution_backward.default")
def convolution_backward(
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
) -> tuple[Any, Any, Any]:
    """Compute gradients of input, weight and bias; None where the mask has False."""
    conv_args = (stride, padding, dilation, transposed, output_padding, groups)
    # One vjp each, so that only wanted gradients are computed. JAX's rule for convolutions
    # needs no values of the forward pass, which XLA then leaves out.
    input_grad = weight_grad = bias_grad = None
    if output_mask[0]:
        (input_grad,) = jax.vjp(lambda x: _apply(x, weight, *conv_args), input)[1](grad_output)
    if output_mask[1]:
        (weight_grad,) = jax.vjp(lambda w: _apply(input, w, *conv_args), weight)[1](grad_output)
    if output_mask[2]:
        bias_grad = bias_gradient(grad_output)
    return input_grad, weight_grad, bias_grad


@lowering("aten.im2col.default")
def im2col(self: Any, kernel_size: Sizes, dilation: Sizes, padding: Sizes, stride: Sizes) -> Any:
    """Extract windows as columns: (N, C, H, W) or (C, H, W) -> (N, C * kernel, windows)."""
    x = self if self.ndim == 4 else self[None]

    def patches_of(x: Any) -> Any:
        return lax.conv_general_dilated_patches(
            x,
            kernel_size,
            stride,
            [(p, p) for p in padding],
            rhs_dilation=dilation,
            precision=lax.Precision.HIGHEST,  # products with ones must be exact
        )

    if not x.size:  # JAX's patches divide by it
        shape = jax.eval_shape(patches_of, jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype))
        empty = jnp.zeros((0, shape.shape[1], math.prod(shape.shape[2:])), x.dtype)
        return empty if self.ndim == 4 else empty[0]
    patches = patches_of(x)
    columns = patches.reshape(x.shape[0], x.shape[1] * math.prod(kernel_size), -1)
    return columns if self.ndim == 4 else columns[0]


@lowering("aten.col2im.default")
def col2im(
    self: Any,
    output_size: Sizes,
    kernel_size: Sizes,
    dilation: Sizes,
    padding: Sizes,
    stride: Sizes,
) -> Any:
    """Add up windows at their positions, the transpose of `im2col`."""
    columns = self if self.ndim == 3 else self[None]
    channels = columns.shape[1] // math.prod(kernel_size)
    like = jnp.zeros((columns.shape[0], channels, *output_size), opmath(self.dtype))
    transpose = jax.vjp(lambda x: im2col(x, kernel_size, dilation, padding, stride), like)[1]
    (image,) = transpose(columns.astype(like.dtype))
    return (image if self.ndim == 3 else image[0]).astype(self.dtype)
