"""Attention in 16 bits, in a form for which XLA moves few bytes; see `half_ops`."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from accbench.engines.xla_common.scalars import scalar_like


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float,
    dropout_p: float = 0.0, is_causal: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Compute softmax(scale * query key^T) value for (..., T, E); saves the weights in 16 bits.

    The result is that of `torch.nn.functional.scaled_dot_product_attention` without a mask.

    Args:
        query: (..., T, E).
        key: (..., S, E).
        value: (..., S, E).
        scale: factor of the scores.
        dropout_p: fraction of the weights that dropout zeroes, below 1.
        is_causal: the i-th query sees keys up to the i-th.
    """
    result: torch.Tensor = _HalfAttention.apply(query, key, value, scale**0.5, dropout_p, is_causal)
    return result


class _HalfAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, root_of_scale: float,
        dropout_p: float, is_causal: bool,
    ) -> torch.Tensor:  # fmt: skip
        # torch scales both by the root, too: the scores might overflow 16 bits otherwise.
        query, key = query * root_of_scale, key * root_of_scale
        scores = (query @ key.mT).float()
        if is_causal:
            positions = [torch.arange(n, device=scores.device) for n in scores.shape[-2:]]
            scores = scores.masked_fill(positions[0][:, None] < positions[1], float("-inf"))
        weights = scores.softmax(-1).to(value.dtype)
        ctx.root_of_scale, ctx.scale = root_of_scale, 1 / (1 - dropout_p)
        if not dropout_p:
            ctx.save_for_backward(query, key, value, weights)
            return weights @ value
        # Dropout's multiplier goes to the values, which are fewer than the weights.
        is_kept = torch.native_dropout(weights, dropout_p, True)[1]
        weights_after_dropout = torch.where(is_kept, weights, scalar_like(0, weights))
        ctx.save_for_backward(query, key, value, weights, weights_after_dropout)
        return weights_after_dropout @ (value * ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, key, value, weights, *saved_after_dropout = ctx.saved_tensors
        weights_after_dropout = weights
        # XLA removes a pair of adjacent casts, and would keep the weights in float32 from the
        # forward pass on; `abs` stands between them, and weights have no sign.
        weights_float = weights.abs().float()
        if saved_after_dropout:
            (weights_after_dropout,) = saved_after_dropout
            gradient = gradient * ctx.scale
        grad_weights = (gradient @ value.mT).float()
        if saved_after_dropout:
            # A weight that is 0 in 16 bits contributes nothing, dropped or not.
            is_counted = weights_after_dropout != scalar_like(0, weights_after_dropout)
            grad_weights = torch.where(is_counted, grad_weights, scalar_like(0, grad_weights))
        grad_scores = weights_float * (
            grad_weights - (weights_float * grad_weights).sum(-1, keepdim=True)
        )
        grad_scores = grad_scores.to(gradient.dtype)
        grad_query, grad_key = grad_scores @ key, grad_scores.mT @ query
        return (
            grad_query * ctx.root_of_scale,
            grad_key * ctx.root_of_scale,
            weights_after_dropout.mT @ gradient,
            None,
            None,
            None,
        )
