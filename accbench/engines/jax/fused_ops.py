"""Operations in 16 bits as a GPU fuses them: `xla_common.half_ops` in the place of torch's."""

from functools import partial
from typing import Any

import torch

from accbench.engines.common.cuda_autocast import OpOverrides
from accbench.engines.jax import fused_attention
from accbench.engines.xla_common import half_attention, half_ops

_aten = torch.ops.aten


def _batch_norm(
    batch: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool,
    momentum: float, eps: float, cudnn: bool,
) -> torch.Tensor:  # fmt: skip
    if training and weight is not None and bias is not None and half_ops.supports(batch):
        return half_ops.batch_norm(batch, weight, bias, mean, var, momentum, eps)
    return torch.batch_norm(batch, weight, bias, mean, var, training, momentum, eps, cudnn)


def _relu(x: torch.Tensor) -> torch.Tensor:
    return half_ops.relu(x) if half_ops.supports(x) else torch.relu(x)


def _relu_in_place(x: torch.Tensor) -> torch.Tensor:
    return half_ops.relu_in_place(x) if half_ops.supports(x) else torch.relu_(x)


def _max_pool2d(
    x: torch.Tensor, size: list[int], stride: list[int] | tuple[()] = (),
    padding: Any = (0,), dilation: Any = (1,), ceil_mode: bool = False,
) -> torch.Tensor:  # fmt: skip
    # Without BatchNorm and ReLU before it, its lowering is as good (`pools_by_place`).
    if half_ops.supports_max_pool2d(x, size, dilation, ceil_mode) and half_ops.is_batch_norm_relu(
        x
    ):
        return half_ops.max_pool2d(x, size, stride, padding)
    return torch.max_pool2d(x, size, stride, padding, dilation, ceil_mode)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False, kept: bool = False,
) -> torch.Tensor:  # fmt: skip
    is_plain = mask is None and dropout_p < 1 and key.dtype is value.dtype is query.dtype
    if is_plain and half_ops.supports(query):
        if enable_gqa:
            key, value = (_one_for_each_head(heads, query) for heads in (key, value))
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        if kept and not dropout_p and fused_attention.supports(query, key, value, is_causal):
            return fused_attention.attention(query, key, value, is_causal, factor)
        return half_attention.attention(query, key, value, factor, dropout_p, is_causal)
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _one_for_each_head(grouped: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Repeat keys or values (..., groups, S, E) -> (..., heads, S, E) of grouped queries."""
    return grouped.repeat_interleave(query.shape[-3] // grouped.shape[-3], -3)


def overrides(keeps_attention: bool) -> OpOverrides:
    """Return what takes the place of torch's operations in a capture.

    Args:
        keeps_attention: leave attention without dropout to `lowering.rows.fused_attention`.
    """
    return {
        _aten.batch_norm.default: _batch_norm,
        _aten.relu.default: _relu,
        _aten.relu_.default: _relu_in_place,
        _aten.max_pool2d.default: _max_pool2d,
        _aten.scaled_dot_product_attention.default: partial(_attention, kept=keeps_attention),
    }
