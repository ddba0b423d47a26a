"""Attention of some queries to some keys, with what merging it with other keys' needs.

Arrays are (N, H, T, D). Keys and values may have fewer heads, of which each serves as many
consecutive heads of queries (grouped-query attention). Sums are in float32, or in a wider type of
the queries. CUDA's 16-bit types go by torch's FlashAttention-2, everything else by matrix products
of a few queries at a time.
"""

import math
from collections.abc import Iterator

import torch

_MAX_SCORES = 1 << 22
"""Scores that are in memory at a time: 16 MiB in float32."""


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted values (N, H, T, D), and the log-sum-exp of the scores (N, H, T).

    Args:
        q: queries.
        k: keys.
        v: values.
        is_causal: the t-th query sees the first t keys alone, of as many as there are queries.
        scale: what products of queries and keys are multiplied by.
    """
    if _has_flash(q, k, v):
        q, k, v = map(_with_rows, (q, k, v))
        out, log_sums, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, is_causal, scale=scale
        )
        return out, log_sums
    k, v = _wide(k), _wide(v)
    out = k.new_empty(*q.shape[:-1], v.shape[-1])
    log_sums = k.new_empty(q.shape[:-1])
    for rows, num_keys in _tiles(q, k, is_causal):
        scores = _scores(q[:, :, rows], k[:, :, :num_keys], rows.start, is_causal, scale)
        log_sums[:, :, rows] = scores.logsumexp(-1)
        weights = scores.sub_(log_sums[:, :, rows, None]).exp_()
        out[:, :, rows] = _ungrouped(_grouped(weights, v) @ v[:, :, :num_keys], rows)
    return out, log_sums


def gradients(
    grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, log_sums: torch.Tensor, is_causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the part of the gradients of queries, keys and values that these keys have.

    Args:
        grad_out: the gradient of `out`.
        q: queries.
        k: keys.
        v: values.
        out: the weighted values over all keys, of which these may be a part.
        log_sums: likewise.
        is_causal: as `attend` has it.
        scale: likewise.
    """
    if _has_flash(q, k, v):
        return _flash_gradients(grad_out, q, k, v, out, log_sums, is_causal, scale)
    k, v = _wide(k), _wide(v)
    grad_q = k.new_empty(q.shape)
    grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
    for rows, num_keys in _tiles(q, k, is_causal):
        seen_k, seen_v = k[:, :, :num_keys], v[:, :, :num_keys]
        q_rows, grad_rows = _wide(q[:, :, rows]), _wide(grad_out[:, :, rows])
        scores = _scores(q_rows, seen_k, rows.start, is_causal, scale)
        weights = scores.sub_(log_sums[:, :, rows, None]).exp_()
        grad_weights = _ungrouped(_grouped(grad_rows, v) @ seen_v.transpose(2, 3), rows)
        # What the softmax takes from all weights' gradients alike: of all keys, as is `out`.
        mean = (grad_rows * _wide(out[:, :, rows])).sum(-1, keepdim=True)
        grad_scores = _grouped(grad_weights.sub_(mean).mul_(weights).mul_(scale), k)
        grad_q[:, :, rows] = _ungrouped(grad_scores @ seen_k, rows)
        grad_k[:, :, :num_keys] += grad_scores.transpose(2, 3) @ _grouped(q_rows, k)
        grad_v[:, :, :num_keys] += _grouped(weights, v).transpose(2, 3) @ _grouped(grad_rows, v)
    return grad_q, grad_k, grad_v


def _has_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return whether FlashAttention-2's kernels compute this."""
    width = q.shape[-1]
    return (
        q.is_cuda
        and torch.version.hip is None
        and q.dtype in (torch.bfloat16, torch.float16)
        and v.shape[-1] == width <= 256
        and width % 8 == 0
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


def _flash_gradients(
    grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, log_sums: torch.Tensor, is_causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    grad_out, q, k, v, out = map(_with_rows, (grad_out, q, k, v, out))
    no_seed = torch.empty(0, dtype=torch.uint64, device=q.device)  # nothing is dropped
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad_out, q, k, v, out, log_sums.contiguous(), None, None, q.shape[2], k.shape[2], 0.0,
        is_causal, no_seed, no_seed, scale=scale,
    )  # fmt: skip
    return gradients


def _with_rows(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose last axis is contiguous, as kernels need it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _tiles(q: torch.Tensor, k: torch.Tensor, is_causal: bool) -> Iterator[tuple[slice, int]]:
    """Yield rows of queries, and how many keys the last of them sees."""
    num_samples, num_heads, num_queries, _ = q.shape
    num_keys = k.shape[2]
    num_rows = max(1, _MAX_SCORES // (num_samples * num_heads * num_keys))
    for start in range(0, num_queries, num_rows):
        end = min(start + num_rows, num_queries)
        yield slice(start, end), end if is_causal else num_keys


def _scores(
    q: torch.Tensor, k: torch.Tensor, first: int, is_causal: bool, scale: float
) -> torch.Tensor:
    """Return the scores (N, H, T, S) of queries, of which the first is number `first`."""
    products = _ungrouped(_grouped(_wide(q), k) @ k.transpose(2, 3), slice(0, q.shape[2]))
    products *= scale
    if is_causal:
        allowed = torch.ones(products.shape[2:], dtype=torch.bool, device=q.device).tril(first)
        products.masked_fill_(~allowed, -math.inf)
    return products


def _grouped(x: torch.Tensor, of_keys: torch.Tensor) -> torch.Tensor:
    """Return (N, H, T, X) as (N, G, H / G * T, X): heads that share keys are further queries."""
    return x.unflatten(1, (of_keys.shape[1], -1)).flatten(2, 3)


def _ungrouped(x: torch.Tensor, rows: slice) -> torch.Tensor:
    return x.unflatten(2, (-1, rows.stop - rows.start)).flatten(1, 2)
