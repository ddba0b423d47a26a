"""Several GPUs of one machine: what each way to share a Llama out over them costs.

    python benchmarks/gpu_meshes.py OUT                     on a machine with several NVIDIA GPUs
    python benchmarks/gpu_meshes.py OUT --device cpu --tiny a rehearsal, with four processes

Trains Llama of 1.1 billion parameters and Llama 3 of 8 billion in bfloat16 by each mesh that the
number of GPUs allows, and prints tokens a second and GPU, and peak memory, beside what torchtitan
has published for the same model, sequences and batch. Each mesh has a time of its own. After each,
OUT/results.md, OUT/results.jsonl and OUT/log.txt are written anew. A failed mesh is a row with the
last 30 lines of its standard error. What is done stays in --state: a second call goes on.
"""

import argparse
import dataclasses
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from accbench.pjrt import nvidia  # noqa: E402
from benchmarks import gpu_day  # noqa: E402
from benchmarks.gpu_parts import items as parts  # noqa: E402
from benchmarks.gpu_parts.models import Model  # noqa: E402
from benchmarks.smoke import add_tiny  # noqa: E402

REHEARSED = 4
_RECOMPUTE = ("--checkpoint_modules=LlamaDecoderLayer",)
MODELS = {
    "1b": Model("llama_1b", 4, ("--seq_len=2048",)),
    # torchtitan's length and batch. A worker's activations do not fit without recomputing.
    "8b": Model("llama_8b", 2, ("--seq_len=8192", *_RECOMPUTE)),
}
TINY_MODELS = {name: Model("llama_tiny", 2, ("--seq_len=32", *_RECOMPUTE)) for name in MODELS}
# Model -> (heads of keys, blocks), which limit --tp and --pp.
LIMITS = {"llama_1b": (4, 22), "llama_8b": (8, 32), "llama_tiny": (2, 2)}


@dataclasses.dataclass(frozen=True)
class Mesh:
    """A way to share a model out."""

    engine: str
    flags: tuple[str, ...] = ()
    num_sharing: int = 1
    """Workers that share a batch."""
    accumulate: int = 1
    """Micro-batches, each of one sequence or more."""
    models: tuple[str, ...] = ("1b", "8b")


_SHARD = ("--dp_shard=auto",)
MESHES = {
    "ddp": Mesh("ddp", models=("1b",)),
    "zero1": Mesh("ddp", (*_SHARD, "--zero=1"), models=("1b",)),
    "zero3": Mesh("ddp", _SHARD),
    "zero3-inductor": Mesh("inductor", _SHARD),
    "zero3-jax": Mesh("jax", _SHARD),
    "tp2-zero3": Mesh("ddp", ("--tp=2", *_SHARD, "--sequence_parallel"), 2),
    "tp2-zero3-jax": Mesh("jax", ("--tp=2", *_SHARD, "--sequence_parallel"), 2),
    "cp2-zero3": Mesh("ddp", ("--cp=2", *_SHARD), 2),
    "cp2-zero3-jax": Mesh("jax", ("--cp=2", *_SHARD), 2),
    "pp2-zero1": Mesh("ddp", ("--pp=2", *_SHARD, "--zero=1"), 2, accumulate=8),
}


def _meshes(model: Model, num_gpus: int) -> dict[str, Mesh]:
    """Return the meshes above that leave several workers to shard over, and the largest cuts."""
    heads, blocks = LIMITS[model.name]
    found = {
        name: mesh
        for name, mesh in MESHES.items()
        if mesh.num_sharing == 1
        or (num_gpus % mesh.num_sharing == 0 and num_gpus > mesh.num_sharing)
    }
    tp, pp = (_largest_divisor(num_gpus, limit) for limit in (heads, blocks))
    found[f"tp{tp}"] = Mesh("ddp", (f"--tp={tp}", "--sequence_parallel"), tp)
    # With four micro-batches a stage, stages wait for less than a fifth of the time.
    found[f"pp{pp}"] = Mesh("ddp", (f"--pp={pp}",), pp, accumulate=4 * pp)
    return found


def _largest_divisor(number: int, limit: int) -> int:
    return max(one for one in range(1, limit + 1) if number % one == 0)


# Tokens a second and GPU, and GiB, of Llama 3.1 8B on eight H100 of 96 GB at 500 W, two sequences
# of 8,192 tokens a GPU, FSDP2, selective checkpointing (here each block is recomputed):
# benchmarks/llama3_h100_202412_torchtitan.md, table 1, in the repository pytorch/torchtitan.
TORCHTITAN = {"8b-zero3": (5762, 82.4), "8b-zero3-inductor": (6667, 77.0)}


def all_items(day: parts.Day, num_gpus: int) -> list[parts.Item]:
    """Return the meshes that so many GPUs allow, those with published figures first."""
    models = TINY_MODELS if day.is_tiny else MODELS
    made = [
        _item(day, f"{key}-{name}", model, mesh, num_gpus)
        for key, model in models.items()
        for name, mesh in _meshes(model, num_gpus).items()
        if key in mesh.models
    ]
    return sorted(made, key=lambda item: item.name not in TORCHTITAN)


def _item(day: parts.Day, name: str, model: Model, mesh: Mesh, num_gpus: int) -> parts.Item:
    batch = max(model.batch_size * mesh.num_sharing, mesh.accumulate)
    run = day.state / name / "run"
    flags = parts.train_flags(
        day, replace(model, batch_size=batch), "bfloat16", mesh.engine, run, day.steps
    )
    command = [
        sys.executable, "launch_single_task.py", f"--nproc_per_node={num_gpus}", *flags,
        f"--accumulate={mesh.accumulate}", *mesh.flags,
    ]  # fmt: skip
    seq_len = next(int(flag.partition("=")[2]) for flag in model.size if "seq_len" in flag)
    facts = {
        "model": model.name, "engine": mesh.engine, "batch_size": batch, "num_gpus": num_gpus,
        "mesh": " ".join(mesh.flags), "seq_len": seq_len,
    }  # fmt: skip
    return parts.Item(name, 300, command, parts.of_run, facts)


def render(rows: list[dict[str, Any]]) -> str:
    """Return the page as Markdown: a table, then the errors."""
    gpu_name = next((row["gpu_name"] for row in rows if row.get("gpu_name")), "not known yet")
    lines = [
        f"GPUs: {gpu_name}", "",
        "| row | engine | mesh | batch | tokens/s a GPU | step ms | peak GiB | compile s | "
        "torchtitan: tokens/s a GPU | GiB | |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
        *(_line(row) for row in rows), "",
        "Batch: sequences of the workers that share one. Peak GiB: of the first GPU, after the "
        "warm-up. torchtitan: published for Llama 3.1 8B on eight H100 of 96 GB, December 2024, "
        "with selective checkpointing, where here each block is recomputed.", "",
    ]  # fmt: skip
    for row in rows:
        if "error" in row:
            lines += [f"## {row['name']}: {row['error']}", "", "```", *row["stderr"], "```", ""]
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    speed = row.get("samples_per_s")
    tokens = speed * row["seq_len"] / row["num_gpus"] if speed else None
    peak = row.get("peak_bytes")
    published = TORCHTITAN.get(row["name"]) if row["num_gpus"] == 8 else None
    cells = [
        row["name"], row["engine"], row["mesh"], row["batch_size"], _number(tokens, ",.0f"),
        _number(row.get("step_ms"), ",.1f"), _number(peak and peak / 2**30, ".1f"),
        _number(row.get("compile_s"), ".1f"), *((f"{published[0]:,}", published[1])
        if published else ("-", "-")), row.get("error", "ok"),
    ]  # fmt: skip
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _number(value: float | None, pattern: str) -> str:
    return "-" if value is None else format(value, pattern)


def main() -> int:
    """Return 0 if every mesh trained."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="receives results.md, results.jsonl and log.txt")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--items", default="", help="names or their beginnings, comma-separated")
    parser.add_argument("--limit_s", type=float, default=3600, help="seconds for all")
    parser.add_argument("--state", type=Path, help="folder that a second call goes on from",
                        default=Path(tempfile.gettempdir()) / "accbench-gpu-meshes")  # fmt: skip
    parser.add_argument("--redo", action="store_true", help="do again what is done")
    add_tiny(parser)
    asked = parser.parse_args()
    gpu_day.end_item_on_sigterm()
    num_gpus = len(nvidia.driver().gpus) if asked.device == "cuda" else REHEARSED
    if num_gpus < 2:
        parser.error(f"{num_gpus} GPUs are here, and a mesh needs two: --device cpu --tiny")
    day = parts.Day(asked.state.absolute(), asked.device, asked.tiny)
    chosen = parts.choose(all_items(day, num_gpus), asked.items)
    rows = gpu_day.run_all(
        chosen, day.state, asked.out.absolute(), asked.limit_s, asked.redo, render
    )
    print(render(rows))
    failed = [row["name"] for row in rows if "error" in row]
    print(f"{len(rows)} of {len(chosen)} meshes done, failed: {', '.join(failed) or 'none'}")
    return int(bool(failed) or len(rows) < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
