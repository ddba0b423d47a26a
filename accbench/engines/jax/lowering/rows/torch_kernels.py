"""Convolutions, matrix products, attention and max-pooling by torch's kernels.

The rules say where. These kernels are oneDNN's, MKL's and torch's own, which on a CPU are faster
than XLA's. On a GPU XLA itself calls cuDNN and cuBLAS.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import fx

from accbench.engines.jax.lowering.context import Context
from accbench.engines.jax.lowering.dtypes import opmath
from accbench.engines.jax.lowering.rows.windows import WindowGeometry
from accbench.engines.jax.lowering.table import lowering
from accbench.engines.jax.lowering.torch_calls import supports, torch_call

Sizes = Sequence[int]

# Numbers of multiplications below which XLA's own product is as fast or faster, as measured: a
# call costs some 50 microseconds (docs/measured.md), and XLA computes 16-bit products in float32.
_MIN_PRODUCT, _MIN_PRODUCT_16_BIT = 2**27, 2**25


def channels_first_view(tensor: torch.Tensor) -> torch.Tensor:
    """View (N, *spatial, C) as (N, C, *spatial), without a copy."""
    return tensor.movedim(-1, 1)


def result_types(*arrays: Any) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of arrays, for results that are like them."""
    return [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]


def _image(tensor: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return (N, *spatial, C) as (N, C, *spatial).

    It is copied where that is cheaper than what oneDNN would otherwise do: reorder the kernel's
    weights for an image with its channels last.
    """
    image = channels_first_view(tensor)
    return image.contiguous() if w.numel() > tensor.numel() else image


@torch_call
def _convolve(read: list[torch.Tensor], write: list[torch.Tensor], conv_args: Any) -> None:
    x, w = read[:2]
    bias = read[2] if len(read) > 2 else None
    y = torch.ops.aten.convolution(_image(x, w), w, bias, *conv_args)
    channels_first_view(write[0]).copy_(y)


@torch_call
def _convolve_backward(
    read: list[torch.Tensor], write: list[torch.Tensor], conv_args: Any, mask: list[bool]
) -> None:
    g, x, w = read
    computed = torch.ops.aten.convolution_backward(
        _image(g, w), _image(x, w), w, None, *conv_args, [*mask, False]
    )
    outputs = iter(write)
    if mask[0]:
        channels_first_view(next(outputs)).copy_(computed[0])
    if mask[1]:
        next(outputs).copy_(computed[1])


def should_convolve(
    context: Context, x: Any, w: Any, shape: Sizes, conv_args: Sequence[Any]
) -> bool:
    """Return whether torch computes a convolution, or its gradients.

    Args:
        context: has the rules.
        x: the input, in any order of axes.
        w: the weight, as torch has it.
        shape: of the result, in any order of axes.
        conv_args: of torch's convolution, from stride to groups.
    """
    if 0 in shape or not supports(x, w):
        return False
    if _is_product(w, conv_args):
        return _is_worth_a_call(context, x, math.prod(shape) * w.shape[1])
    return str(x.dtype) in context.rules.torch_convolutions


def _is_worth_a_call(context: Context, array: Any, num: int) -> bool:
    """Return whether torch computes a product of this dtype and number of multiplications."""
    minimum = _MIN_PRODUCT if array.dtype == jnp.float32 else _MIN_PRODUCT_16_BIT
    return num >= minimum and str(array.dtype) in context.rules.torch_products


def convolution(x: Any, w: Any, bias: Any, shape: Sizes, conv_args: Sequence[Any]) -> Any:
    """Convolve x (N, *spatial, C) with w as torch has it -> `shape`, channels last.

    Args:
        x: channels last.
        w: (out, C / groups, *kernel), or (C, out / groups, *kernel) if transposed.
        bias: (out,) or None.
        shape: of the result.
        conv_args: of torch's convolution, from stride to groups.
    """
    if _is_product(w, conv_args):
        rows = _strided(x, conv_args[0]).reshape(-1, x.shape[-1])
        return _matrix(rows, w.reshape(w.shape[:2]), [False, True], bias).reshape(shape)
    result = jax.ShapeDtypeStruct(shape, x.dtype)
    arrays = (x, w) if bias is None else (x, w, bias)
    (y,) = _convolve([result], *arrays, conv_args=list(conv_args))
    return y


def convolution_backward(
    g: Any, x: Any, w: Any, conv_args: Sequence[Any], mask: Sequence[bool]
) -> tuple[Any, Any]:
    """Compute the gradients of x and w; None where the mask has False.

    g and x have their channels last.
    """
    if _is_product(w, conv_args):
        return _product_backward(g, x, w, conv_args[0], mask)
    results = result_types(*(array for array, wanted in zip((x, w), mask, strict=True) if wanted))
    computed = iter(
        _convolve_backward(results, g, x, w, conv_args=list(conv_args), mask=list(mask))
    )
    x_grad, w_grad = (next(computed) if wanted else None for wanted in mask)
    return x_grad, w_grad


def _is_product(w: Any, conv_args: Sequence[Any]) -> bool:
    """Return whether each pixel's channels are multiplied by one matrix: 1 x 1, no padding.

    torch's products write into the given memory, its convolutions into memory of their own.
    """
    _, padding, _, transposed, _, groups = conv_args
    return math.prod(w.shape[2:]) == 1 and not any(padding) and not transposed and groups == 1


def _strided(x: Any, stride: Sizes) -> Any:
    """Take every `stride`-th pixel of x (N, *spatial, C)."""
    steps = stride if len(stride) == x.ndim - 2 else [*stride] * (x.ndim - 2)
    index = (slice(None), *(slice(None, None, step) for step in steps))
    return x[index]


def _product_backward(g: Any, x: Any, w: Any, stride: Sizes, mask: Sequence[bool]) -> Any:
    x_grad = w_grad = None
    rows, matrix = g.reshape(-1, g.shape[-1]), w.reshape(w.shape[:2])
    strided, scatter = jax.vjp(lambda x: _strided(x, stride), x)
    if mask[0]:
        x_grad = scatter(_matrix(rows, matrix, [False, False]).reshape(strided.shape))[0]
    if mask[1]:
        pixels = strided.reshape(-1, x.shape[-1])
        w_grad = _matrix(rows, pixels, [True, False]).reshape(w.shape)
    return x_grad, w_grad


def _matrix(a: Any, b: Any, transposed: list[bool], bias: Any = None) -> Any:
    """Multiply two matrices, each of which is transposed first if `transposed` says so."""
    rows, columns = a.shape[transposed[0]], b.shape[not transposed[1]]
    result = jax.ShapeDtypeStruct((rows, columns), a.dtype)
    arrays = [a, b] if bias is None else [a, b, bias]
    return _multiply([result], *arrays, transposed=transposed)[0]


def should_multiply(context: Context, a: Any, b: Any) -> bool:
    """Return whether torch computes the product of a (..., M, K) and b (..., K, N)."""
    fits = supports(a, b) and a.dtype == b.dtype
    return fits and _is_worth_a_call(context, a, math.prod(a.shape) * b.shape[-1])


def product(context: Context, a: Any, b: Any, bias: Any = None) -> Any:
    """Multiply a (..., M, K) by b (..., K, N), plus `bias` (N,) or None -> (..., M, N).

    The graph's node has a and b as its last two arguments. One that was transposed is passed to
    torch in the order in which it is stored.
    """
    shape = jax.ShapeDtypeStruct((*a.shape[:-1], b.shape[-1]), a.dtype)
    operands, transposed = [], []
    for array, node in zip((a, b), context.node.args[-2:], strict=True):
        transposed.append(_is_transposed(node))
        operands.append(jnp.swapaxes(array, -1, -2) if transposed[-1] else array)
    (result,) = _multiply(
        [shape], *operands, *([] if bias is None else [bias]), transposed=transposed
    )
    return result


def _is_transposed(node: fx.Node) -> bool:
    """Return whether the node swaps the last two axes of its input."""
    ndim = node.meta["val"].ndim
    swap = [*range(ndim - 2), ndim - 1, ndim - 2]
    order = [*range(ndim)]
    arguments: Any = node.args[1:]
    if str(node.target) == "aten.t.default":
        return True
    if str(node.target) == "aten.transpose.int":
        a, b = arguments
        order[a], order[b] = order[b], order[a]
    elif str(node.target) == "aten.permute.default":
        order = [axis % ndim for axis in arguments[0]]
    return order == swap


@torch_call
def _multiply(read: list[torch.Tensor], write: list[torch.Tensor], transposed: list[bool]) -> None:
    a, b = (t.mT if swapped else t for t, swapped in zip(read, transposed, strict=False))
    if len(read) == 3:
        torch.addmm(read[2], a, b, out=write[0])
    else:
        torch.matmul(a, b, out=write[0])


def should_pool(context: Context, x: Any, w: WindowGeometry) -> bool:
    """Return whether torch computes max-pooling of x, or its gradient."""
    return context.rules.torch_pools and w.rank == 2 and supports(x)


@torch_call
def _max_pool(read: list[torch.Tensor], write: list[torch.Tensor], pool_args: Any) -> None:
    y, _ = torch.ops.aten.max_pool2d_with_indices(channels_first_view(read[0]), *pool_args)
    channels_first_view(write[0]).copy_(y)


@torch_call
def _max_pool_backward(read: list[torch.Tensor], write: list[torch.Tensor], pool_args: Any) -> None:
    g, x = map(channels_first_view, read)
    # Computed again for the indices: that is no more work than to save and read 64-bit indices.
    _, indices = torch.ops.aten.max_pool2d_with_indices(x, *pool_args)
    x_grad = torch.ops.aten.max_pool2d_with_indices_backward(g, x, *pool_args, indices)
    channels_first_view(write[0]).copy_(x_grad)


def window_max(x: Any, w: WindowGeometry) -> Any:
    """Compute max-pooling of x (N, H, W, C) -> (N, windows, windows, C)."""
    shape = (x.shape[0], w.num(0), w.num(1), x.shape[-1])
    return _max_pool([jax.ShapeDtypeStruct(shape, x.dtype)], x, pool_args=_pool_arguments(w))[0]


def window_max_grad(g: Any, x: Any, w: WindowGeometry) -> Any:
    """Return the gradient of x (N, H, W, C) through `window_max`."""
    return _max_pool_backward(result_types(x), g, x, pool_args=_pool_arguments(w))[0]


def _pool_arguments(w: WindowGeometry) -> list[Any]:
    """Return torch's arguments of max-pooling, from the kernel on."""
    return [*map(list, (w.kernel, w.stride, w.padding, w.dilation)), w.ceil_mode]


def _heads_first_view(tensor: torch.Tensor) -> torch.Tensor:
    """View (N, length, heads, size) as (N, heads, length, size), and the reverse."""
    return tensor.transpose(1, 2)


@torch_call
def _attend(read: list[torch.Tensor], write: list[torch.Tensor], options: Any) -> None:
    qkv, mask = read[:3], read[3] if len(read) > 3 else None
    out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *map(_heads_first_view, qkv), 0.0, options["is_causal"],
        attn_mask=mask, scale=options["scale"],
    )  # fmt: skip
    _heads_first_view(write[0]).copy_(out)
    write[1].copy_(logsumexp)


@torch_call
def _attend_backward(read: list[torch.Tensor], write: list[torch.Tensor], options: Any) -> None:
    operands, logsumexp, mask = read[:5], read[5], read[6] if len(read) > 6 else None
    computed = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *map(_heads_first_view, operands), logsumexp, 0.0, options["is_causal"],
        attn_mask=mask, scale=options["scale"],
    )  # fmt: skip
    for index, gradient in enumerate(computed):
        _heads_first_view(write[index]).copy_(gradient)


def _swap_heads(*arrays: Any) -> list[Any]:
    """Swap the axes of heads and length.

    Projections give and take heads third, so that XLA then has nothing to transpose.
    """
    return [jnp.swapaxes(array, 1, 2) for array in arrays]


# Captured only where `torch_products` has its dtype; otherwise attention is decomposed.
@lowering("aten._scaled_dot_product_flash_attention_for_cpu.default")
def attention(
    query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False,
    attn_mask: Any = None, scale: float | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Compute attention, and its logsumexp for the backward.

    query (N, heads, length, size) -> its shape, and (N, heads, length) in float32 or wider.
    """
    qkv = _swap_heads(query, key, value)
    shape = (*qkv[0].shape[:-1], value.shape[-1])
    logsumexp_type = jax.ShapeDtypeStruct(query.shape[:-1], opmath(query.dtype))
    results = [jax.ShapeDtypeStruct(shape, query.dtype), logsumexp_type]
    options = {"is_causal": is_causal, "scale": scale}
    out, logsumexp = _attend(results, *qkv, *_optional(attn_mask), options=options)
    return jnp.swapaxes(out, 1, 2), logsumexp


@lowering("aten._scaled_dot_product_flash_attention_for_cpu_backward.default")
def attention_backward(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, dropout_p: float,
    is_causal: bool, attn_mask: Any = None, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    operands = _swap_heads(grad_out, query, key, value, out)
    options = {"is_causal": is_causal, "scale": scale}
    computed = _attend_backward(
        result_types(*operands[1:4]), *operands, logsumexp, *_optional(attn_mask), options=options
    )
    return tuple(_swap_heads(*computed))


def _optional(mask: Any) -> list[Any]:
    return [] if mask is None else [mask]
