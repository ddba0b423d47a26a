"""Attention in 16 bits, spelled so that XLA moves few bytes; as `half_ops`."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from accbench.engines.xla_common.scalars import number


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float,
    dropout_p: float = 0.0, is_causal: bool = False,
) -> torch.Tensor:  # fmt: skip
    """softmax(scale query key^T) value of (..., T, E); what is kept are the weights, in 16 bits.

    As `torch.nn.functional.scaled_dot_product_attention` without a mask.

    Args:
        dropout_p: part of the weights that is dropped, below 1.
        is_causal: the i-th query sees keys up to the i-th.
    """
    result: torch.Tensor = _Attention.apply(query, key, value, scale**0.5, dropout_p, is_causal)
    return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, root: float,
        dropout_p: float, is_causal: bool,
    ) -> torch.Tensor:  # fmt: skip
        # Each by its root, as torch has it, or 16 bits might overflow.
        query, key = query * root, key * root
        scores = (query @ key.mT).float()
        if is_causal:
            places = [torch.arange(n, device=scores.device) for n in scores.shape[-2:]]
            scores = scores.masked_fill(places[0][:, None] < places[1], float("-inf"))
        weights = scores.softmax(-1).to(value.dtype)
        ctx.root, ctx.scale = root, 1 / (1 - dropout_p)
        if not dropout_p:
            ctx.save_for_backward(query, key, value, weights)
            return weights @ value
        # What dropout multiplies by goes to the values, which are smaller than the weights.
        is_kept = torch.native_dropout(weights, dropout_p, True)[1]
        kept = torch.where(is_kept, weights, number(0, weights))
        ctx.save_for_backward(query, key, value, weights, kept)
        return kept @ (value * ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, key, value, weights, *after_dropout = ctx.saved_tensors
        kept = weights
        # XLA takes a pair of casts away where one follows the other, and would keep the weights in
        # float32 from the forward pass on; they have no sign.
        wide = weights.abs().float()
        if after_dropout:
            (kept,) = after_dropout
            gradient = gradient * ctx.scale
        of_weights = (gradient @ value.mT).float()
        if after_dropout:
            # A weight that is 0 in 16 bits counts for nothing here, dropped or not.
            counts = kept != number(0, kept)
            of_weights = torch.where(counts, of_weights, number(0, of_weights))
        of_scores = wide * (of_weights - (wide * of_weights).sum(-1, keepdim=True))
        of_scores = of_scores.to(gradient.dtype)
        of_query, of_key = of_scores @ key, of_scores.mT @ query
        return of_query * ctx.root, of_key * ctx.root, kept.mT @ gradient, None, None, None
