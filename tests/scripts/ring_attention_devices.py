"""The ring of engine jax over devices of one process, beside torch's attention of whole sequences.

    python -m tests.scripts.ring_attention_devices OUT LOWERED|REPEATED

With JAX_ENABLE_X64, and four devices by XLA_FLAGS. It writes OUT/found.json: case -> distances and
dtypes; with LOWERED, of programs, what is in them.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, PartitionSpec
from torch.fx.experimental.proxy_tensor import make_fx

from accbench.distributed.collectives import RankGroup
from accbench.distributed.ring_attention import chunks_per_rank, ring_attention
from accbench.engines.jax.lowering import dtypes, run_graph
from accbench.engines.jax.lowering.rows import ring_attention as rows
from accbench.engines.jax.lowering.rows.collectives import CP_AXIS
from tests.scripts.ring_attention_ranks import (
    ALL_CASES,
    LOWERED,
    REPEATED,
    Case,
    inputs_of,
    of_whole_sequences,
)

NAMES = ("out", "q", "k", "v")


def positions_of(case: Case, num_ranks: int) -> torch.Tensor:
    """The positions of all ranks, one rank after the other."""
    ranks = (RankGroup("", rank, num_ranks) for rank in range(num_ranks))
    return torch.cat([chunks_per_rank(case.num_tokens, rank) for rank in ranks])


def step_of(case: Case, num_ranks: int) -> tuple[Callable[..., Any], list[Any]]:
    """Attention and its gradients as one jitted function over devices, and its arguments."""
    positions = positions_of(case, num_ranks)
    whole = [x.detach()[:, :, positions].contiguous() for x in inputs_of(case)]
    group = RankGroup("", 0, num_ranks)

    def attend(q: Any, k: Any, v: Any, weights: Any) -> list[torch.Tensor]:
        parts = [x.requires_grad_() for x in (q, k, v)]
        with torch.autocast("cpu", torch.bfloat16, case.autocast):
            out = ring_attention(*parts, group, case.is_causal, case.scale)
        return [out, *torch.autograd.grad(out, parts, weights.to(out.dtype))]

    part = [x.chunk(num_ranks, 2)[0].contiguous() for x in whole]
    graph = make_fx(attend, tracing_mode="fake")(*part)
    mesh = Mesh(np.array(jax.devices()[:num_ranks]), (CP_AXIS,))
    cut = PartitionSpec(None, None, CP_AXIS)
    mapped = jax.shard_map(
        lambda *arrays: run_graph(graph, arrays), mesh=mesh, in_specs=cut, out_specs=[cut] * 4,
        check_vma=False,
    )  # fmt: skip
    return jax.jit(mapped), [dtypes.to_jax(x) for x in whole]


def distances(case: Case, num_ranks: int) -> dict[str, Any]:
    limit, rows._MAX_SCORES = rows._MAX_SCORES, min(case.max_scores, rows._MAX_SCORES)
    step, arguments = step_of(case, num_ranks)
    found = step(*arguments)
    rows._MAX_SCORES = limit
    back = positions_of(case, num_ranks).argsort()
    pairs = zip(NAMES, found, of_whole_sequences(case), strict=True)
    of = {
        name: ((as_torch(is_)[:, :, back] - want).norm() / want.norm()).item()
        for name, is_, want in pairs
    }
    return {**of, "dtypes": [str(x.dtype) for x in found]}


def as_torch(array: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(array.astype(jnp.float64)))


def program(num_ranks: int) -> dict[str, Any]:
    """What a program for some ranks has in it."""
    step, arguments = step_of(Case(num_tokens=48), num_ranks)
    lowered = step.lower(*arguments)
    text, compiled = lowered.as_text(), lowered.compile().as_text()
    return {
        "products": text.count("stablehlo.dot_general"),
        "permutes": text.count("stablehlo.collective_permute"),
        "branches": text.count("stablehlo.case") + text.count("stablehlo.if"),
        "compiled permutes": compiled.count(" collective-permute(")
        + compiled.count(" collective-permute-start("),
    }


def main(out: str, kind: str) -> None:
    cases = {"LOWERED": LOWERED, "REPEATED": REPEATED}[kind]
    found: dict[str, Any] = {name: distances(ALL_CASES[name], of) for name, of in cases.items()}
    if kind == "LOWERED":
        found["program"] = {num_ranks: program(num_ranks) for num_ranks in (3, 4)}
    Path(out, "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
