"""BatchNorm by torch's kernels, where the rules say so."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from accbench.engines.jax.lowering.context import Context
from accbench.engines.jax.lowering.rows.torch_kernels import channels_second, like
from accbench.engines.jax.lowering.torch_calls import supports, torch_call


def normalizes(context: Context, x: Any, weight: Any, momentum: Any, *of_channels: Any) -> bool:
    """Whether BatchNorm in training, or its gradients, are torch's to compute.

    Args:
        x: channels last.
        momentum: a number; an array is not handed over.
        of_channels: bias and statistics, or None.
    """
    given = [array for array in (weight, *of_channels) if array is not None]
    # Without a weight torch computes statistics in x's own 16 bits.
    wide = weight is not None or str(x.dtype) == "float32"
    return (
        str(x.dtype) in context.rules.torch_norms
        and supports(x)
        and x.ndim in (4, 5)  # torch writes no other with its channels last
        and x.size > x.shape[-1]  # a single value has no variance
        and isinstance(momentum, int | float)
        and wide
        and all(str(array.dtype) == "float32" for array in given)
    )


@torch_call
def _normalize(
    read: list[torch.Tensor], write: list[torch.Tensor], given: list[bool], how: Any
) -> None:
    x, *others = read
    places = iter(others)
    weight, bias = (next(places) if is_given else None for is_given in given)
    y, batch_mean, invstd, *moved = write
    for place, running in zip(moved, read[len(read) - len(moved) :], strict=True):
        place.copy_(running)  # which torch then moves where it is
    torch.ops.aten.native_batch_norm.out(
        channels_second(x), weight, bias, *(moved or (None, None)), True, *how,
        out=channels_second(y), save_mean=batch_mean, save_invstd=invstd,
    )  # fmt: skip


def batch_norm_train(
    input: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float, axis: int
) -> tuple[Any, Any, Any, Any, Any]:
    """As `normalization.batch_norm_train`, of channels last."""
    arrays, given = (weight, bias, mean, var), [weight is not None, bias is not None]
    per_channel = jax.ShapeDtypeStruct(input.shape[-1:], jnp.float32)
    results = [*like(input), *[per_channel] * (2 if mean is None else 4)]
    y, batch_mean, invstd, *moved = _normalize(
        results, input, *(a for a in arrays if a is not None), given=given, how=[momentum, eps]
    )
    return y, batch_mean, invstd, *(moved or (None, None))


@torch_call
def _normalize_backward(
    read: list[torch.Tensor], write: list[torch.Tensor], eps: float, mask: list[bool]
) -> None:
    g, x, mean, invstd, *weight = read
    computed = torch.ops.aten.native_batch_norm_backward(
        channels_second(g), channels_second(x), weight[0] if weight else None, None, None,
        mean, invstd, True, eps, mask,
    )  # fmt: skip
    places = iter(write)
    if mask[0]:
        channels_second(next(places)).copy_(computed[0])
    for gradient, wanted in zip(computed[1:], mask[1:], strict=True):
        if wanted:
            next(places).copy_(gradient)


def batch_norm_backward(
    grad_out: Any, input: Any, weight: Any, save_mean: Any, save_invstd: Any, eps: float,
    output_mask: Sequence[bool],
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Of channels last -> gradients of input, weight and bias; None where the mask has False."""
    per_channel = jax.ShapeDtypeStruct(input.shape[-1:], jnp.float32)
    all_results = (*like(input), per_channel, per_channel)
    results = [one for one, wanted in zip(all_results, output_mask, strict=True) if wanted]
    arrays = (grad_out, input, save_mean, save_invstd, *([] if weight is None else [weight]))
    computed = iter(_normalize_backward(results, *arrays, eps=eps, mask=list(output_mask)))
    of_x, of_w, of_b = (next(computed) if wanted else None for wanted in output_mask)
    return of_x, of_w, of_b
