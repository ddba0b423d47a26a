"""Attention as one operation of a captured graph, for kernels that keep its scores on the chip.

`lowering.rows.fused_attention` computes it. On the host torch's own attention does.
"""

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable


@torch.library.custom_op("accbench::fused_attention", mutates_args=())
def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float
) -> torch.Tensor:
    return _attend(query, key, value, is_causal, scale).contiguous()


@_forward.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float
) -> torch.Tensor:
    return query.new_empty(query.shape)


@torch.library.custom_op("accbench::fused_attention_backward", mutates_args=())
def _backward(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    is_causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    # By the definition, for autograd does not look into an operation.
    q, k, v, gradient = (tensor.float() for tensor in (query, key, value, grad_out))
    scores = scale * q @ k.mT
    if is_causal:
        is_hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(is_hidden, -math.inf)
    weights, grad_weights = scores.softmax(-1), gradient @ v.mT
    grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True))
    gradients = scale * grad_scores @ k, scale * grad_scores.mT @ q, weights.mT @ gradient
    grad_query, grad_key, grad_value = (each.to(query.dtype).contiguous() for each in gradients)
    return grad_query, grad_key, grad_value


@_backward.register_fake
def _(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    is_causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float
) -> torch.Tensor:
    out: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, scale=scale
    )
    return out


def supports(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> bool:
    """Return whether cuDNN has attention of these, (N, heads, length, size), on any such GPU."""
    size = query.shape[-1]
    return (
        query.dim() == key.dim() == value.dim() == 4
        and query.shape[:2] == key.shape[:2]
        and size == value.shape[-1]
        and size % 8 == 0
        and size <= 128
        and (not is_causal or query.shape[-2] == key.shape[-2])
    )


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float
) -> torch.Tensor:
    """Compute softmax(scale * query key^T) value of (N, heads, length, size) as one operation."""
    out: torch.Tensor = _FusedAttention.apply(query, key, value, is_causal, scale)
    return out


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool,
        scale: float,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(query, key, value)
        ctx.settings = is_causal, scale
        out: torch.Tensor = _forward(query, key, value, is_causal, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return *_backward(gradient, *ctx.saved_tensors, *ctx.settings), None, None
