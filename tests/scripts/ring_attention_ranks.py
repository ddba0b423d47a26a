"""A rank of four that attend by the ring, beside torch's attention of whole sequences.

    python -m tests.scripts.ring_attention_ranks OUT

Rank 0 writes OUT/found.json: case -> the largest of the ranks' distances, and what they kept.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from accbench.distributed import attention_blocks, process_group
from accbench.distributed.collectives import RankGroup
from accbench.distributed.process_group import Topology
from accbench.distributed.ring_attention import chunks_per_rank, ring_attention


@dataclasses.dataclass(frozen=True)
class Case:
    """Attention of some shape."""

    heads: tuple[int, int] = (4, 4)
    """Of queries, and of keys and values."""
    widths: tuple[int, int] = (8, 8)
    """Of queries and keys, and of values."""
    num_tokens: int = 32
    scale: float | None = None
    is_causal: bool = True
    dtype: torch.dtype = torch.float64
    max_scores: int = attention_blocks._MAX_SCORES
    is_compiled: bool = False
    autocast: bool = False


CASES = {
    "causal": Case(),
    "every key": Case(is_causal=False),
    "shared keys": Case(heads=(6, 2)),
    "one head of keys": Case(heads=(5, 1), widths=(7, 7), num_tokens=24),
    "scaled": Case(heads=(4, 2), scale=0.9),
    "scaled steeply": Case(scale=3.0),
    "narrow values": Case(widths=(8, 3)),
    "few scores at a time": Case(heads=(4, 2), num_tokens=40, max_scores=100),
    "a query at a time": Case(num_tokens=16, max_scores=1, is_causal=False),
    "float32": Case(heads=(4, 2), dtype=torch.float32),
    "bfloat16": Case(heads=(4, 2), dtype=torch.bfloat16, num_tokens=256),
    "autocast": Case(heads=(4, 2), dtype=torch.float32, num_tokens=256, autocast=True),
    "compiled": Case(heads=(4, 2), is_compiled=True),
}
# Lowered to JAX each is compiled for seconds. So there three of them are one, and those whose code
# the others go through as well are for `make soak`.
ALL_CASES = {
    **CASES,
    "steep, narrow, one head": Case(heads=(5, 1), widths=(7, 3), num_tokens=24, scale=3.0),
}
LOWERED = {
    "steep, narrow, one head": 4, "few scores at a time": 4, "a query at a time": 4,
    "autocast": 4, "shared keys": 2,
}  # fmt: skip
"""Case -> number of ranks."""
REPEATED = {
    "one head of keys": 4, "scaled steeply": 4, "narrow values": 4, "float32": 4, "bfloat16": 4,
    "every key": 2,
}  # fmt: skip
"""Likewise."""


def inputs_of(case: Case) -> list[torch.Tensor]:
    """Queries, keys and values of whole sequences, and the gradient of attention."""
    generator = torch.Generator().manual_seed(1)
    (num_heads, num_kv), (width, value_width) = case.heads, case.widths
    shapes = [(num_heads, width), (num_kv, width), (num_kv, value_width), (num_heads, value_width)]
    # Positions before heads in memory, as layers have them.
    return [
        torch.randn(2, case.num_tokens, h, w, generator=generator, dtype=torch.float64)
        .to(case.dtype).transpose(1, 2) for h, w in shapes
    ]  # fmt: skip


def of_whole_sequences(case: Case) -> list[torch.Tensor]:
    """Attention of the inputs and their gradients, in float64."""
    *whole, weights = [x.double().detach() for x in inputs_of(case)]
    whole = [x.requires_grad_() for x in whole]
    expected = scaled_dot_product_attention(
        *whole, is_causal=case.is_causal, scale=case.scale, enable_gqa=True
    )
    return [expected.detach(), *torch.autograd.grad(expected, whole, weights)]


def attend(case: Case, group: RankGroup) -> dict[str, float]:
    """Distances of a rank's part of attention and its gradients, and bytes kept for them."""
    q, k, v, weights = inputs_of(case)
    wanted = of_whole_sequences(case)

    positions = chunks_per_rank(case.num_tokens, group)
    parts = [x[:, :, positions].detach().requires_grad_() for x in (q, k, v)]
    saved: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        saved[x.data_ptr()] = x.numel() * x.element_size()
        return x

    attend_here: Any = ring_attention
    if case.is_compiled:
        attend_here = torch.compile(ring_attention, backend="aot_eager", fullgraph=True)
    attention_blocks._MAX_SCORES = case.max_scores
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x),
        torch.autocast("cpu", torch.bfloat16, case.autocast),
    ):
        out = attend_here(*parts, group, case.is_causal, case.scale)
    found = [out, *torch.autograd.grad(out, parts, weights[:, :, positions].to(out.dtype))]
    names = ("out", "q", "k", "v")
    distances = {
        name: ((is_.double() - want[:, :, positions]).norm() / want.norm()).item()
        for name, is_, want in zip(names, found, wanted, strict=True)
    }
    dtypes = [str(x.dtype) for x in found]
    of_parts = sum(x.numel() * x.element_size() for x in parts)
    of_out = out.numel() * (out.element_size() + max(4, out.element_size()) / case.widths[1])
    return {**distances, "kept": sum(saved.values()), "parts": of_parts + of_out, "dtypes": dtypes}


def main(out: str) -> None:
    topology = Topology.from_env()
    torch.set_num_threads(1)
    process_group.init_distributed(topology, "cpu", 120)
    group = RankGroup.of(dist.group.WORLD)
    found = {}
    for name, case in CASES.items():
        of_ranks: list[Any] = [None] * topology.world_size
        dist.all_gather_object(of_ranks, attend(case, group))
        numbers = {k for k, v in of_ranks[0].items() if isinstance(v, float)}
        found[name] = of_ranks[0] | {k: max(ranks[k] for ranks in of_ranks) for k in numbers}
    if topology.rank == 0:
        Path(out, "found.json").write_text(json.dumps(found))
    process_group.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
