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


def convolve(x: Any, w: Any, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int) -> Any:
    """x (N, C, *spatial), w (out, C / groups, *kernel) -> (N, out, *spatial)."""
    return lax.conv_general_dilated(
        x,
        w,
        window_strides=_each(stride, x),
        padding=[(p, p) for p in _each(padding, x)],
        rhs_dilation=_each(dilation, x),
        feature_group_count=groups,
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
    """x (N, C, *spatial), w (C, out / groups, *kernel) -> (N, out, *spatial).

    The gradient of a convolution with respect to its input: a plain one of the stretched input
    with the mirrored kernel.
    """
    kernel = w.shape[2:]
    w = w.reshape(groups, w.shape[0] // groups, *w.shape[1:]).swapaxes(1, 2)
    w = jnp.flip(w.reshape(-1, *w.shape[2:]), range(2, 2 + len(kernel)))
    reach = [d * (k - 1) for d, k in zip(_each(dilation, x), kernel, strict=True)]
    pads = zip(reach, _each(padding, x), _each(output_padding, x), strict=True)
    return lax.conv_general_dilated(
        x,
        w,
        window_strides=(1,) * len(kernel),
        padding=[(r - p, r - p + more) for r, p, more in pads],
        lhs_dilation=_each(stride, x),
        rhs_dilation=_each(dilation, x),
        feature_group_count=groups,
    )


def _each(sizes: Sizes, x: Any) -> tuple[int, ...]:
    """One size an axis; torch allows one for all."""
    return tuple(sizes) * (x.ndim - 2) if len(sizes) == 1 else tuple(sizes)


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
    how = (stride, padding, dilation, transposed, output_padding, groups)
    y = _apply(input, weight, *how)
    if bias is None:
        return y
    wide = opmath(y.dtype)
    per_channel = bias.astype(wide).reshape(-1, *[1] * (y.ndim - 2))
    return (y.astype(wide) + per_channel).astype(y.dtype)


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
    """Gradients of input, weight and bias; None where the mask says that one isn't wanted."""
    how = (stride, padding, dilation, transposed, output_padding, groups)
    # Each by itself, so that what isn't wanted isn't computed. JAX's rule for convolutions
    # needs no values of the forward pass, which XLA then leaves out.
    of_input = of_weight = of_bias = None
    if output_mask[0]:
        (of_input,) = jax.vjp(lambda x: _apply(x, weight, *how), input)[1](grad_output)
    if output_mask[1]:
        (of_weight,) = jax.vjp(lambda w: _apply(input, w, *how), weight)[1](grad_output)
    if output_mask[2]:
        of_bias = _sum_but_channels(grad_output)
    return of_input, of_weight, of_bias


def _sum_but_channels(g: Any) -> Any:
    return jnp.sum(g, (0, *range(2, g.ndim)), opmath(g.dtype)).astype(g.dtype)


@lowering("aten.im2col.default")
def im2col(self: Any, kernel_size: Sizes, dilation: Sizes, padding: Sizes, stride: Sizes) -> Any:
    """(N, C, H, W) or (C, H, W) -> (N, C * kernel, windows): windows as columns."""
    x = self if self.ndim == 4 else self[None]

    def patches_of(x: Any) -> Any:
        return lax.conv_general_dilated_patches(
            x,
            kernel_size,
            stride,
            [(p, p) for p in padding],
            rhs_dilation=dilation,
            precision=lax.Precision.HIGHEST,  # of a product with ones, which is to be exact
        )

    if not x.size:  # which JAX's patches divide by
        one = jax.eval_shape(patches_of, jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype))
        empty = jnp.zeros((0, one.shape[1], math.prod(one.shape[2:])), x.dtype)
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
    """The sum of windows at their places, the transpose of `im2col`."""
    columns = self if self.ndim == 3 else self[None]
    channels = columns.shape[1] // math.prod(kernel_size)
    like = jnp.zeros((columns.shape[0], channels, *output_size), opmath(self.dtype))
    transpose = jax.vjp(lambda x: im2col(x, kernel_size, dilation, padding, stride), like)[1]
    (image,) = transpose(columns.astype(like.dtype))
    return (image if self.ndim == 3 else image[0]).astype(self.dtype)
