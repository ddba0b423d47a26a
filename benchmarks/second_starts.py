"""Measure how long each engine takes to its first step with warm caches, and how far behind ddp.

    python benchmarks/second_starts.py FOLDER
    python benchmarks/second_starts.py FOLDER --engines ddp,inductor,xla,jax   # in .venv-xla

Trains a ResNet-18 at 96 px for a few steps in fresh processes, each engine in turn. The first
round of all fills the caches, which lie in FOLDER, and is left out. Prints seconds from the
worker's start to the end of its first step, and the median of the rounds' differences to ddp.
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from accbench.recording import records  # noqa: E402
from benchmarks.smoke import TINY_RUN, add_tiny  # noqa: E402

FLAGS = (
    "--model=resnet18", "--image_size=96", "--data=mock", "--batch_size=8", "--amp_level=O0",
    "--max_steps=8", "--workers=1", "--log_interval=2", "--warmup_steps=2", "--save_interval=0",
)  # fmt: skip
TINY_FLAGS = (*TINY_RUN, "--data=synthetic", "--max_steps=4")


def first_step_s(engine: str, folder: Path, caches: Path, flags: tuple[str, ...]) -> float:
    """Return the seconds from the worker's start to the end of its first step."""
    done = subprocess.run(
        [sys.executable, "launch_single_task.py", *FLAGS, *flags, f"--engine={engine}",
         f"--output_dir={folder}"],
        cwd=ROOT, env={**os.environ, "XDG_CACHE_HOME": str(caches)},
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"a run of engine {engine} failed, as it says above")
    read = records.read(folder / "records.jsonl")
    (end,) = [record for record in read if isinstance(record, records.EndRecord)]
    assert end.time_to_first_step_s is not None
    return end.time_to_first_step_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="new, for the runs and their caches")
    parser.add_argument("--engines", default="ddp,inductor,jax", help="of which ddp is one")
    parser.add_argument("--rounds", type=int, default=8, help="that count, behind the first")
    add_tiny(parser)
    asked = parser.parse_args()
    engines = asked.engines.split(",")
    if "ddp" not in engines:
        parser.error("--engines lacks ddp, beside which the others are shown")
    folder = asked.folder.absolute()
    flags = TINY_FLAGS if asked.tiny else ()
    num_rounds = 2 if asked.tiny else asked.rounds
    seconds: dict[str, list[float]] = {engine: [] for engine in engines}
    for number in range(num_rounds + 1):
        for engine in engines:
            of_run = folder / f"{engine}-{number}"
            seconds[engine].append(first_step_s(engine, of_run, folder / "caches", flags))
    print("| engine | cold | warm, seconds | behind ddp, median (least to most) |")
    print("| --- | ---: | --- | --- |")
    for engine, (cold, *warm) in seconds.items():
        behind = [mine - of_ddp for mine, of_ddp in zip(warm, seconds["ddp"][1:], strict=True)]
        shown = (
            f"{statistics.median(behind):.2f} ({min(behind):.2f} to {max(behind):.2f})"
            if engine != "ddp" else "-"
        )  # fmt: skip
        print(f"| {engine} | {cold:.1f} | {', '.join(f'{s:.2f}' for s in warm)} | {shown} |")


if __name__ == "__main__":
    main()
