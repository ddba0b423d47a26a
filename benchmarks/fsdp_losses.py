"""Does `--dp_shard` train as plain torch FSDP2 does? Two known shapes, four workers, on docs/.

    python benchmarks/fsdp_losses.py FOLDER [--rows torchtitan,accelerate] [--tiny]

The shapes are those of torchtitan's debug model and of Accelerate's nlp_example, without dropout
and with fewer tokens. Each is trained by `accbench run --dp_shard auto`, and by a bare loop around
torch's `fully_shard`, `clip_grad_norm_` and AdamW, from the same weights and batches. Prints a
Markdown table of losses averaged over the workers, and returns 1 where the two differ.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from accbench.report import run as runs  # noqa: E402
from benchmarks.processes import run_ranks  # noqa: E402
from benchmarks.smoke import add_tiny  # noqa: E402

WORKERS = 4
SHARED = ("--device=cpu", "--amp_level=O0", "--workers=0", "--threads=1")
# Row -> flags; sizes, rates and clipping are the examples', but for a rate that changes.
ROWS: dict[str, tuple[str, ...]] = {
    "torchtitan": (
        "--model=benchmarks.nets:titan_debug", "--tokens.vocab_size=2048", "--seq_len=128",
        "--batch_size=8", "--lr=8e-4", "--weight_decay=0.1", "--clip_norm=1", "--max_steps=10",
    ),
    "accelerate": (
        "--model=benchmarks.nets:bert_still", "--tokens.vocab_size=28996", "--seq_len=32",
        "--batch_size=2", "--lr=2e-5", "--weight_decay=0", "--max_steps=3",
    ),
}  # fmt: skip
TINY = (
    "--model=llama_tiny", "--seq_len=16", "--batch_size=2", "--lr=1e-3", "--clip_norm=1",
    "--max_steps=2",
)  # fmt: skip
# What rounding may do to losses of float32 in so many steps.
MOST_APART = 1e-5


def plain_losses(flags: tuple[str, ...]) -> list[float]:
    """Train with torch's own FSDP2 on one of the ranks, and return the losses' means."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    from accbench import config, models, resolving
    from accbench.config import plugins
    from accbench.distributed.process_group import Topology

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    task = resolving.resolve(config.parse([*SHARED, *flags]))
    name, location = config.data_name(task.data)
    source = plugins.load("data", name)(location, task, task.options[name], Topology.from_env())
    spec = models.of_task(task)
    torch.manual_seed(task.seed)
    net = spec.build(source.num_classes)
    for blocks in [m for m in net.modules() if isinstance(m, nn.ModuleList)]:
        for block in blocks:
            fully_shard(block)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=task.lr, weight_decay=task.weight_decay)
    losses = []
    for batch in _batches(source, task.max_steps or 1):
        optimizer.zero_grad()
        loss = spec.loss(net, batch)
        loss.backward()
        if task.clip_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), task.clip_norm)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / WORKERS)
    dist.destroy_process_group()
    return losses


def _text(folder: Path) -> str:
    return f"--data=tokens:{folder / 'text'}"


def _batches(source: Any, num_steps: int) -> Iterator[Any]:
    loader = source.train_loader()
    loader.set_epoch(0)
    yield from (batch for batch, _ in zip(loader, range(num_steps), strict=False))


def sharded_losses(folder: Path, flags: tuple[str, ...]) -> list[float]:
    """Train by accbench, unless it is there already, and return the losses' means."""
    if runs.read_if_there(folder).status != "ok":
        subprocess.run(
            [sys.executable, "launch_single_task.py", *SHARED, f"--nproc_per_node={WORKERS}",
             "--dp_shard=auto", "--warmup_steps=1", "--log_interval=1", "--eval_interval=0",
             "--save_interval=0", "--tensorboard=off", *flags, f"--output_dir={folder}"],
            cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    return [window.loss for window in runs.read(folder).windows if window.loss is not None]


def main() -> int:
    """Return 0 if the losses of each row are the same."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    add_tiny(parser)
    asked = parser.parse_args()
    rows = {"tiny": TINY} if asked.tiny else {row: ROWS[row] for row in asked.rows.split(",")}
    if asked.rank is not None:
        losses = plain_losses((_text(asked.folder), *rows[asked.rank]))
        (asked.folder / f"{asked.rank}.json").write_text(json.dumps(losses))
        return 0
    folder = asked.folder.absolute()
    if not (folder / "text").exists():  # which nobody edits between two runs
        shutil.copytree(ROOT / "docs", folder / "text")
    is_same = True
    print("| shape | step | FSDP2 | accbench | apart |\n| --- | ---: | ---: | ---: | ---: |")
    for row, flags in rows.items():
        tiny = ["--tiny"] if asked.tiny else []
        if not (folder / f"{row}.json").exists():
            run_ranks(WORKERS, [__file__, str(folder), f"--rank={row}", *tiny], {})
        plain = json.loads((folder / f"{row}.json").read_text())
        sharded = sharded_losses(folder / row, (_text(folder), *flags))
        pairs = [*zip(plain, sharded, strict=True)]
        is_same &= all(abs(a / b - 1) < MOST_APART for a, b in pairs)
        for step in dict.fromkeys((1, len(pairs) // 2, len(pairs))):
            a, b = pairs[step - 1]
            print(f"| {row} | {step} | {a:.6f} | {b:.6f} | {abs(a / b - 1):.1e} |", flush=True)
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
