"""What each way to share a sequence keeps and sends: bytes of one attention layer on one rank.

    python benchmarks/context_parallel_bytes.py [--tiny]

Two and four ranks on the CPU attend to one sequence by both of `--cp_attention`, forward and
backward, in float32. Counted on rank 0: what the forward pass keeps for the backward pass, what
each pass sends to other ranks, and the peak of anonymous memory over what was there before, for
which the C library is told to give back what is freed. Prints a table in MiB.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.processes import run_ranks  # noqa: E402
from benchmarks.sharding_memory import MALLOC, watched_peak  # noqa: E402
from benchmarks.smoke import add_tiny  # noqa: E402

# Tokens, heads of queries, heads of keys and values, width of a head.
SHAPES = [(4096, 8, 8, 64), (4096, 8, 2, 64)]
TINY_SHAPES = [(64, 4, 2, 8)]


def attend(algorithm: str, q: Any, k: Any, v: Any, group: Any) -> Any:
    """Return what a rank's queries attend to, (N, H, T, D)."""
    from torch.nn.functional import scaled_dot_product_attention

    from accbench.distributed.collectives import all_to_all
    from accbench.distributed.ring_attention import ring_attention

    if algorithm == "ring":
        return ring_attention(q, k, v, group)
    q, k, v = (all_to_all(x, group, cut=1, joined=2) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return all_to_all(out, group, cut=2, joined=1)


def count_sent(counts: list[int]) -> None:
    """Have all_to_all add the bytes that it sends to other ranks to the last of some counts."""
    import torch
    import torch.distributed as dist

    functional: Any = torch.ops._c10d_functional
    send = functional.all_to_all_single

    def counted(x: Any, sizes_out: list[int], sizes_in: list[int], name: str) -> Any:
        to_others = sum(sizes_in) - sizes_in[dist.get_rank()]
        counts[-1] += x.numel() // x.shape[0] * to_others * x.element_size()
        return send(x, sizes_out, sizes_in, name)

    functional.all_to_all_single = counted


def rank(algorithm: str, shape: tuple[int, int, int, int], out: Path) -> None:
    """Attend on one rank, and write what rank 0 counted."""
    import torch
    import torch.distributed as dist

    from accbench.distributed import process_group
    from accbench.distributed.collectives import RankGroup
    from accbench.distributed.process_group import Topology

    topology = Topology.from_env()
    torch.set_num_threads(1)
    process_group.init_distributed(topology, "cpu", 300)
    group = RankGroup.of(dist.group.WORLD)  # type: ignore[arg-type]
    num_tokens, num_heads, num_kv, width = shape
    length = num_tokens // group.size
    q, k, v = (
        torch.randn(1, heads, length, width, requires_grad=True)
        for heads in (num_heads, num_kv, num_kv)
    )
    sent, kept = [0], {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    attend(algorithm, q, k, v, group).sum().backward()  # imports of torch's, and first buffers
    for x in (q, k, v):
        x.grad = None
    count_sent(sent)
    with watched_peak() as peak:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            result = attend(algorithm, q, k, v, group)
        sent.append(0)
        result.sum().backward()
        found = {"kept": sum(kept.values()), "sent": sent, "peak": peak()}
    if topology.rank == 0:
        out.write_text(json.dumps(found))
    process_group.close()


def measure(num_ranks: int, algorithm: str, shape: tuple[int, ...], tiny: bool) -> dict[str, Any]:
    """Run the ranks, and return what rank 0 counted."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        arguments = [__file__, f"--rank={algorithm}", f"--shape={json.dumps(shape)}"]
        arguments += [f"--out={out}", *["--tiny"] * tiny]
        run_ranks(num_ranks, arguments, {**os.environ, **MALLOC})
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def main() -> int:
    """Print the table, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_tiny(parser)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--shape", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is not None:
        rank(asked.rank, asked.shape, asked.out)
        return 0
    print("| tokens | heads, of keys | cp | | kept | sent forward | sent backward | peak |")
    print("| ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: |")
    for shape in TINY_SHAPES if asked.tiny else SHAPES:
        for num_ranks in (2, 4):
            for algorithm in ("ulysses", "ring"):
                if algorithm == "ulysses" and shape[2] % num_ranks:
                    continue
                of = measure(num_ranks, algorithm, shape, asked.tiny)
                mib = [f"{n / 2**20:.1f}" for n in (of["kept"], *of["sent"], of["peak"])]
                print(f"| {shape[0]} | {shape[1]}, {shape[2]} | {num_ranks} | {algorithm} | "
                      f"{' | '.join(mib)} |", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
