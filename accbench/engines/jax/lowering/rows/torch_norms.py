"""BatchNorm by torch's kernels, where the rules say so."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from accbench.engines.jax.lowering.context import Context
from accbench.engines.jax.lowering.rows.torch_kernels import channels_first_view, result_types
from accbench.engines.jax.lowering.torch_calls import supports, torch_call


def should_normalize(context: Context, x: Any, weight: Any, momentum: Any, *others: Any) -> bool:
    """Return whether torch computes BatchNorm in training, or its gradients.

    Args:
        context: has the rules.
        x: channels last.
        weight: (C,) or None.
        momentum: a number; arrays are not passed to torch.
        *others: bias and statistics, or None.
    """
    per_channel = [array for array in (weight, *others) if array is not None]
    # Without a weight torch computes statistics in x's own 16 bits.
    is_wide = weight is not None or str(x.dtype) == "float32"
    return (
        str(x.dtype) in context.rules.torch_norms
        and supports(x)
        and x.ndim in (4, 5)  # torch writes no other with its channels last
        and x.size > x.shape[-1]  # a single value has no variance
        and isinstance(momentum, int | float)
        and is_wide
        and all(str(array.dtype) == "float32" for array in per_channel)
    )


@torch_call
def _normalize(
    read: list[torch.Tensor], write: list[torch.Tensor], has: list[bool], settings: Any
) -> None:
    x, *others = read
    optional = iter(others)
    weight, bias = (next(optional) if is_given else None for is_given in has)
    y, batch_mean, invstd, *running_outputs = write
    for output, running in zip(
        running_outputs, read[len(read) - len(running_outputs) :], strict=True
    ):
        output.copy_(running)  # which torch then updates in place
    torch.ops.aten.native_batch_norm.out(
        channels_first_view(x), weight, bias, *(running_outputs or (None, None)), True, *settings,
        out=channels_first_view(y), save_mean=batch_mean, save_invstd=invstd,
    )  # fmt: skip


def batch_norm_train(
    input: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float, axis: int
) -> tuple[Any, Any, Any, Any, Any]:
    """Compute `normalization.batch_norm_train` with channels last."""
    arrays, has = (weight, bias, mean, var), [weight is not None, bias is not None]
    per_channel = jax.ShapeDtypeStruct(input.shape[-1:], jnp.float32)
    results = [*result_types(input), *[per_channel] * (2 if mean is None else 4)]
    y, batch_mean, invstd, *running = _normalize(
        results, input, *(a for a in arrays if a is not None), has=has, settings=[momentum, eps]
    )
    return y, batch_mean, invstd, *(running or (None, None))


@torch_call
def _normalize_backward(
    read: list[torch.Tensor], write: list[torch.Tensor], eps: float, mask: list[bool]
) -> None:
    g, x, mean, invstd, *weight = read
    computed = torch.ops.aten.native_batch_norm_backward(
        channels_first_view(g), channels_first_view(x), weight[0] if weight else None, None, None,
        mean, invstd, True, eps, mask,
    )  # fmt: skip
    outputs = iter(write)
    if mask[0]:
        channels_first_view(next(outputs)).copy_(computed[0])
    for gradient, wanted in zip(computed[1:], mask[1:], strict=True):
        if wanted:
            next(outputs).copy_(gradient)


def batch_norm_backward(
    grad_out: Any, input: Any, weight: Any, save_mean: Any, save_invstd: Any, eps: float,
    output_mask: Sequence[bool],
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Compute the gradients of input, weight and bias, with channels last.

    Those for which the mask has False are None.
    """
    per_channel = jax.ShapeDtypeStruct(input.shape[-1:], jnp.float32)
    all_results = (*result_types(input), per_channel, per_channel)
    results = [result for result, wanted in zip(all_results, output_mask, strict=True) if wanted]
    arrays = (grad_out, input, save_mean, save_invstd, *([] if weight is None else [weight]))
    computed = iter(_normalize_backward(results, *arrays, eps=eps, mask=list(output_mask)))
    x_grad, w_grad, b_grad = (next(computed) if wanted else None for wanted in output_mask)
    return x_grad, w_grad, b_grad
