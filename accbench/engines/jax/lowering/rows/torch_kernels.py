"""Convolutions, products of matrices, attention and max-pooling by torch's kernels, where the
rules say so.

They are oneDNN's, MKL's and torch's own, which on a CPU are ahead of what XLA has. On a GPU XLA
itself calls cuDNN and cuBLAS.
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
from accbench.engines.jax.lowering.rows.windows import Windows
from accbench.engines.jax.lowering.table import lowering
from accbench.engines.jax.lowering.torch_calls import supports, torch_call

Sizes = Sequence[int]

# Multiplications below which XLA's own product is as fast or faster, as measured: a call costs
# some 50 microseconds (docs/measured.md). Of 16 bits XLA makes products in float32.
_FEW, _FEW_IN_16_BITS = 2**27, 2**25


def channels_second(tensor: torch.Tensor) -> torch.Tensor:
    """(N, *spatial, C) as (N, C, *spatial), where it lies."""
    return tensor.movedim(-1, 1)


def like(*arrays: Any) -> list[jax.ShapeDtypeStruct]:
    """Results of a call, as these arrays are."""
    return [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]


def _image(tensor: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """(N, *spatial, C) as (N, C, *spatial).

    Copied where that is less than oneDNN would do to the kernel's weights, which it has to put
    into another order for an image with its channels last.
    """
    image = channels_second(tensor)
    return image.contiguous() if w.numel() > tensor.numel() else image


@torch_call
def _convolve(read: list[torch.Tensor], write: list[torch.Tensor], how: Any) -> None:
    x, w = read[:2]
    bias = read[2] if len(read) > 2 else None
    y = torch.ops.aten.convolution(_image(x, w), w, bias, *how)
    channels_second(write[0]).copy_(y)


@torch_call
def _convolve_backward(
    read: list[torch.Tensor], write: list[torch.Tensor], how: Any, mask: list[bool]
) -> None:
    g, x, w = read
    computed = torch.ops.aten.convolution_backward(
        _image(g, w), _image(x, w), w, None, *how, [*mask, False]
    )
    places = iter(write)
    if mask[0]:
        channels_second(next(places)).copy_(computed[0])
    if mask[1]:
        next(places).copy_(computed[1])


def convolves(context: Context, x: Any, w: Any, shape: Sizes, how: Sequence[Any]) -> bool:
    """Whether a convolution, or its gradients, are torch's to compute.

    Args:
        shape: of what it gives; the order of axes doesn't matter.
        how: of torch's convolution, from stride to groups.
    """
    if 0 in shape or not supports(x, w):
        return False
    if _is_product(w, how):
        return _pays(context, x, math.prod(shape) * w.shape[1])
    return str(x.dtype) in context.rules.torch_convolutions


def _pays(context: Context, array: Any, num: int) -> bool:
    """A product of so many multiplications of such an array's elements."""
    few = _FEW if array.dtype == jnp.float32 else _FEW_IN_16_BITS
    return num >= few and str(array.dtype) in context.rules.torch_products


def convolution(x: Any, w: Any, bias: Any, shape: Sizes, how: Sequence[Any]) -> Any:
    """x (N, *spatial, C), w as torch has it -> `shape`, channels last.

    Args:
        how: of torch's convolution, from stride to groups.
    """
    if _is_product(w, how):
        rows = _thinned(x, how[0]).reshape(-1, x.shape[-1])
        return _matrix(rows, w.reshape(w.shape[:2]), [False, True], bias).reshape(shape)
    result = jax.ShapeDtypeStruct(shape, x.dtype)
    arrays = (x, w) if bias is None else (x, w, bias)
    (y,) = _convolve([result], *arrays, how=list(how))
    return y


def convolution_backward(
    g: Any, x: Any, w: Any, how: Sequence[Any], mask: Sequence[bool]
) -> tuple[Any, Any]:
    """g and x channels last -> the gradients of x and w; None where the mask has False."""
    if _is_product(w, how):
        return _product_backward(g, x, w, how[0], mask)
    results = like(*(array for array, wanted in zip((x, w), mask, strict=True) if wanted))
    computed = iter(_convolve_backward(results, g, x, w, how=list(how), mask=list(mask)))
    of_x, of_w = (next(computed) if wanted else None for wanted in mask)
    return of_x, of_w


def _is_product(w: Any, how: Sequence[Any]) -> bool:
    """Of 1 x 1 kernels without padding: each pixel's channels times one matrix.

    torch's products write where they are to, its convolutions into memory of their own.
    """
    _, padding, _, transposed, _, groups = how
    return math.prod(w.shape[2:]) == 1 and not any(padding) and not transposed and groups == 1


def _thinned(x: Any, stride: Sizes) -> Any:
    """Every so manyth pixel of x (N, *spatial, C)."""
    each = stride if len(stride) == x.ndim - 2 else [*stride] * (x.ndim - 2)
    places = (slice(None), *(slice(None, None, step) for step in each))
    return x[places]


def _product_backward(g: Any, x: Any, w: Any, stride: Sizes, mask: Sequence[bool]) -> Any:
    of_x = of_w = None
    rows, matrix = g.reshape(-1, g.shape[-1]), w.reshape(w.shape[:2])
    thinned, widen = jax.vjp(lambda x: _thinned(x, stride), x)
    if mask[0]:
        of_x = widen(_matrix(rows, matrix, [False, False]).reshape(thinned.shape))[0]
    if mask[1]:
        pixels = thinned.reshape(-1, x.shape[-1])
        of_w = _matrix(rows, pixels, [True, False]).reshape(w.shape)
    return of_x, of_w


def _matrix(a: Any, b: Any, turned: list[bool], added: Any = None) -> Any:
    """The product of two matrices, each of which is turned first if that is said."""
    rows, columns = a.shape[turned[0]], b.shape[not turned[1]]
    result = jax.ShapeDtypeStruct((rows, columns), a.dtype)
    arrays = [a, b] if added is None else [a, b, added]
    return _multiply([result], *arrays, turned=turned)[0]


def multiplies(context: Context, a: Any, b: Any) -> bool:
    """Whether the product of a (..., M, K) and b (..., K, N) is torch's to compute."""
    fits = supports(a, b) and a.dtype == b.dtype
    return fits and _pays(context, a, math.prod(a.shape) * b.shape[-1])


def product(context: Context, a: Any, b: Any, added: Any = None) -> Any:
    """a (..., M, K), b (..., K, N) and `added` (N,) or None -> (..., M, N).

    The graph's node has a and b as its last two arguments: where one was transposed, it is given
    to torch as it lies.
    """
    shape = jax.ShapeDtypeStruct((*a.shape[:-1], b.shape[-1]), a.dtype)
    operands, turned = [], []
    for array, node in zip((a, b), context.node.args[-2:], strict=True):
        turned.append(_is_transposed(node))
        operands.append(jnp.swapaxes(array, -1, -2) if turned[-1] else array)
    (result,) = _multiply([shape], *operands, *([] if added is None else [added]), turned=turned)
    return result


def _is_transposed(node: fx.Node) -> bool:
    """Whether it swaps the last two axes of what it is given."""
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
def _multiply(read: list[torch.Tensor], write: list[torch.Tensor], turned: list[bool]) -> None:
    a, b = (t.mT if swapped else t for t, swapped in zip(read, turned, strict=False))
    if len(read) == 3:
        torch.addmm(read[2], a, b, out=write[0])
    else:
        torch.matmul(a, b, out=write[0])


def pools(context: Context, x: Any, w: Windows) -> bool:
    """Whether max-pooling of x, or its gradient, is torch's to compute."""
    return context.rules.torch_pools and w.rank == 2 and supports(x)


@torch_call
def _largest(read: list[torch.Tensor], write: list[torch.Tensor], how: Any) -> None:
    y, _ = torch.ops.aten.max_pool2d_with_indices(channels_second(read[0]), *how)
    channels_second(write[0]).copy_(y)


@torch_call
def _gradient_of_largest(read: list[torch.Tensor], write: list[torch.Tensor], how: Any) -> None:
    g, x = map(channels_second, read)
    # Again, for the indices: no more work than to keep them, of 64 bits each, and to read them.
    _, indices = torch.ops.aten.max_pool2d_with_indices(x, *how)
    of_x = torch.ops.aten.max_pool2d_with_indices_backward(g, x, *how, indices)
    channels_second(write[0]).copy_(of_x)


def largest(x: Any, w: Windows) -> Any:
    """x (N, H, W, C) -> (N, windows, windows, C)."""
    shape = (x.shape[0], w.num(0), w.num(1), x.shape[-1])
    return _largest([jax.ShapeDtypeStruct(shape, x.dtype)], x, how=_of_pool(w))[0]


def gradient_of_largest(g: Any, x: Any, w: Windows) -> Any:
    """What reaches x (N, H, W, C) through `largest`."""
    return _gradient_of_largest(like(x), g, x, how=_of_pool(w))[0]


def _of_pool(w: Windows) -> list[Any]:
    """torch's arguments of max-pooling, from the kernel on."""
    return [*map(list, (w.kernel, w.stride, w.padding, w.dilation)), w.ceil_mode]


def _heads_second(tensor: torch.Tensor) -> torch.Tensor:
    """(N, length, heads, size) as (N, heads, length, size), where it lies, and back."""
    return tensor.transpose(1, 2)


@torch_call
def _attend(read: list[torch.Tensor], write: list[torch.Tensor], how: Any) -> None:
    given, mask = read[:3], read[3] if len(read) > 3 else None
    out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *map(_heads_second, given), 0.0, how["is_causal"], attn_mask=mask, scale=how["scale"]
    )
    _heads_second(write[0]).copy_(out)
    write[1].copy_(logsumexp)


@torch_call
def _attend_backward(read: list[torch.Tensor], write: list[torch.Tensor], how: Any) -> None:
    given, logsumexp, mask = read[:5], read[5], read[6] if len(read) > 6 else None
    computed = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *map(_heads_second, given), logsumexp, 0.0, how["is_causal"],
        attn_mask=mask, scale=how["scale"],
    )  # fmt: skip
    for place, gradient in enumerate(computed):
        _heads_second(write[place]).copy_(gradient)


def _swapped(*arrays: Any) -> list[Any]:
    """Heads third, as projections give and take them: XLA then has nothing to transpose."""
    return [jnp.swapaxes(array, 1, 2) for array in arrays]


# Captured only where `torch_products` has its dtype; else attention is taken apart.
@lowering("aten._scaled_dot_product_flash_attention_for_cpu.default")
def attention(
    query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False,
    attn_mask: Any = None, scale: float | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """query (N, heads, length, size) -> as query, and (N, heads, length) in float32 or wider."""
    given = _swapped(query, key, value)
    shape = (*given[0].shape[:-1], value.shape[-1])
    sums = jax.ShapeDtypeStruct(query.shape[:-1], opmath(query.dtype))
    results = [jax.ShapeDtypeStruct(shape, query.dtype), sums]
    how = {"is_causal": is_causal, "scale": scale}
    out, logsumexp = _attend(results, *given, *_given(attn_mask), how=how)
    return jnp.swapaxes(out, 1, 2), logsumexp


@lowering("aten._scaled_dot_product_flash_attention_for_cpu_backward.default")
def attention_backward(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, dropout_p: float,
    is_causal: bool, attn_mask: Any = None, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    given = _swapped(grad_out, query, key, value, out)
    how = {"is_causal": is_causal, "scale": scale}
    computed = _attend_backward(like(*given[1:4]), *given, logsumexp, *_given(attn_mask), how=how)
    return tuple(_swapped(*computed))


def _given(mask: Any) -> list[Any]:
    return [] if mask is None else [mask]
