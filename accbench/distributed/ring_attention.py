"""Ring attention: each rank keeps its queries, and keys and values go round the ranks.

Liu et al., Ring Attention with Blockwise Transformers for Near-Infinite Context, 2023. The rank's
softmax over the keys that it has seen is merged with that over the next ones by their log-sum-exp.
In the backward pass keys and values go round again, and their gradients with them, each rank adding
its queries' part. So no rank has more keys at a time than its part and the next one's.

A causal mask leaves the last queries more keys than the first. So a sequence is cut into twice as
many chunks as there are ranks, and rank i has chunks i and 2 * size - 1 - i (as Llama 3's training
has it: Grattafiori et al., 2024): every rank has as many pairs to compute in every round.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from accbench.distributed import attention_blocks
from accbench.distributed.collectives import RankGroup, autocast_dtype

_ALL = slice(None)


def chunks_per_rank(num_tokens: int, group: RankGroup) -> torch.Tensor:
    """Return the positions in a sequence that a rank has, int64 (T / size,)."""
    chunks = torch.arange(num_tokens).chunk(2 * group.size)
    return torch.cat([chunks[group.rank], chunks[-1 - group.rank]])


def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: RankGroup,
    is_causal: bool = True, scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attend to the keys of all ranks.

    Args:
        q: this rank's queries, (N, H, T, D), where positions are those of `chunks_per_rank`.
        k: its keys, of as many heads or a divisor of them.
        v: its values, likewise.
        group: the ranks.
        is_causal: whether queries see the keys at their own and earlier positions alone.
        scale: what products of queries and keys are multiplied by; None: 1 / sqrt(D).
    """
    dtype = autocast_dtype(q)
    if dtype is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    out: torch.Tensor = _ring_attention(q, k, v, group.name, is_causal, scale)[0]
    return out


# Operators of their own: compilers would keep what both passes compute, such as the keys received
# and their scores, from the one for the other, and these are what must not be in memory.
@torch.library.custom_op("accbench::ring_attention", mutates_args=())
def _ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group_name: str, is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    group = _group_named(group_name)
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=dtype)
    log_sums = q.new_full(q.shape[:-1], -math.inf, dtype=dtype)
    with torch.autocast(q.device.type, enabled=False):
        for owner, (k_part, v_part) in _rounds([k, v], group):
            rows, keys, is_diagonal = _visible(owner, group, is_causal, q.shape[2])
            new = attention_blocks.attend(
                q[:, :, rows], k_part[:, :, keys], v_part[:, :, keys], is_diagonal, scale
            )
            _merge(out[:, :, rows], log_sums[:, :, rows], *new)
    return out.to(q.dtype), log_sums


@_ring_attention.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group_name: str, is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=dtype)


@torch.library.custom_op("accbench::ring_attention_backward", mutates_args=())
def _ring_attention_backward(
    grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, log_sums: torch.Tensor, group_name: str, is_causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    group = _group_named(group_name)
    grad_q = torch.zeros_like(q, dtype=log_sums.dtype, memory_format=torch.contiguous_format)
    received: list[torch.Tensor] = []
    with torch.autocast(q.device.type, enabled=False):
        for owner, (k_part, v_part) in _rounds([k, v], group):
            rows, keys, is_diagonal = _visible(owner, group, is_causal, q.shape[2])
            new = attention_blocks.gradients(
                grad_out[:, :, rows], q[:, :, rows], k_part[:, :, keys], v_part[:, :, keys],
                out[:, :, rows], log_sums[:, :, rows], is_diagonal, scale,
            )  # fmt: skip
            grad_q[:, :, rows] += new[0]
            # These are the same keys' from the ranks before, sent while this rank computed.
            sums = _wait(received) if received else [
                torch.zeros_like(x, dtype=log_sums.dtype, memory_format=torch.contiguous_format)
                for x in (k, v)
            ]  # fmt: skip
            for total, part in zip(sums, new[1:], strict=True):
                total[:, :, keys] += part
            received = _pass_on(sums, group)
    grad_k, grad_v = _wait(received)  # of this rank's, which have been everywhere
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


@_ring_attention_backward.register_fake
def _(
    grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, log_sums: torch.Tensor, group_name: str, is_causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    q, k, v, *ctx.arguments = inputs
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: Any, grad_out: torch.Tensor, _: Any) -> tuple[Any, ...]:
    gradients = _ring_attention_backward(grad_out, *ctx.saved_tensors, *ctx.arguments)
    return *gradients, *(None for _ in ctx.arguments)


_ring_attention.register_autograd(_backward, setup_context=_setup_context)


def _group_named(name: str) -> RankGroup:
    # By its name, and not by this rank, so that all ranks compile one graph.
    resolve: Any = dist.distributed_c10d._resolve_process_group
    return RankGroup.of(resolve(name))


def _visible(
    owner: int, group: RankGroup, is_causal: bool, num_queries: int
) -> tuple[slice, slice, bool]:
    """Return the queries that see keys of a rank, those keys, and whether the mask is a triangle.

    Of each rank the first half is an early chunk, and the second half a late one.
    """
    if not is_causal:
        return _ALL, _ALL, False
    if owner == group.rank:
        return _ALL, _ALL, True
    half = num_queries // 2
    if owner < group.rank:
        return _ALL, slice(0, half), False
    return slice(half, None), _ALL, False


def _merge(
    out: torch.Tensor, log_sums: torch.Tensor, new_out: torch.Tensor, new_log_sums: torch.Tensor
) -> None:
    """Write attention to further keys into what was computed, in place."""
    totals = torch.logaddexp(log_sums, new_log_sums)
    out *= (log_sums - totals).exp()[..., None]
    out += new_out * (new_log_sums - totals).exp()[..., None]
    log_sums.copy_(totals)


def _rounds(
    tensors: list[torch.Tensor], group: RankGroup
) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Yield each rank and its tensors, this rank's first, the next ones under way meanwhile."""
    for number in range(group.size):
        is_last = number == group.size - 1
        pending = [] if is_last else _pass_on(tensors, group)
        yield (group.rank - number) % group.size, tensors
        tensors = _wait(pending)


def _pass_on(tensors: list[torch.Tensor], group: RankGroup) -> list[torch.Tensor]:
    """Send tensors to the next rank, and return those of the rank before, to be waited for.

    An all_to_all in which each rank has something for one other: no order can block it, and NCCL
    sends nothing else.
    """
    return [_passed_on(tensor, group) for tensor in tensors]


def _passed_on(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    sizes_in, sizes_out = [0] * group.size, [0] * group.size
    sizes_in[(group.rank + 1) % group.size] = x.numel()
    sizes_out[group.rank - 1] = x.numel()
    received: torch.Tensor = torch.ops._c10d_functional.all_to_all_single(
        x.contiguous().view(-1), sizes_out, sizes_in, group.name
    )
    return received.view(x.shape)


def _wait(pending: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.ops._c10d_functional.wait_tensor(tensor) for tensor in pending]
