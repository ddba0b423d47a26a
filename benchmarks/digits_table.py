"""Does every engine learn? recipes/digits.yaml to its end, by engine, workers, type and seed.

    python benchmarks/digits_table.py FOLDER [--engines ddp,inductor,xla,jax] [--seeds 3]
        [--tiny]

Every worker has one thread, and there are as many runs at once as there are cores for them.
Prints a Markdown table of top-1 on the held-out digits, in per cent, and of the seconds of a run,
from the command to its end; the same command goes on where it was stopped.
"""

import argparse
import itertools
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from accbench.data import digits  # noqa: E402
from accbench.report import run as runs  # noqa: E402
from benchmarks.smoke import add_tiny  # noqa: E402

# Points between the engines' means that are more than chance, and what all must reach.
MAX_APART, LEAST = 0.5, 98.0
TINY_FLAGS = ("--epochs=1", "--lr_warmup_epochs=0", "--tensorboard=off")


def train(
    folder: Path, data: Path, engine: str, workers: int, amp: str, seed: int, more: tuple[str, ...]
) -> runs.RecordedRun:
    """Make one run, unless it is there already; write its seconds into FOLDER/seconds."""
    if runs.read_if_there(folder).status != "ok":
        began = time.monotonic()
        subprocess.run(
            [sys.executable, "launch_single_task.py", "--config=recipes/digits.yaml",
             f"--data=imagefolder:{data}", f"--engine={engine}", f"--nproc_per_node={workers}",
             f"--amp_level={amp}", f"--seed={seed}", "--batch_size", str(32 // workers),
             "--workers=0", "--threads=1", "--save_interval=0", *more, f"--output_dir={folder}"],
            cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        (folder / "seconds").write_text(f"{time.monotonic() - began:.0f}")
    return runs.read(folder)


def main() -> int:
    """Return 0 if all reach what they must and the engines agree; with --tiny nothing is asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engines", default="ddp,inductor,xla,jax")
    parser.add_argument("--seeds", type=int, default=3)
    add_tiny(parser)
    flags = parser.parse_args()
    kinds = [(1, "O0")] if flags.tiny else list(itertools.product((1, 2), ("O0", "O1")))
    if flags.tiny:
        flags.engines, flags.seeds = "ddp", 1
    data = flags.folder.absolute() / "digits"
    digits.make(data)
    print("| workers | type | engine | top-1, by seed | mean | seconds a run |")
    print("| ---: | --- | --- | --- | ---: | ---: |")
    good = True
    engines, seeds = flags.engines.split(","), range(flags.seeds)
    for workers, amp in kinds:
        places = {
            (engine, seed): flags.folder.absolute() / f"{engine}-{workers}-{amp}-{seed}"
            for engine, seed in itertools.product(engines, seeds)
        }
        with ThreadPoolExecutor(max(psutil.cpu_count(logical=False) // workers, 1)) as pool:
            started = {
                (engine, seed): pool.submit(
                    train,
                    place,
                    data,
                    engine,
                    workers,
                    amp,
                    seed,
                    TINY_FLAGS if flags.tiny else (),
                )  # fmt: skip
                for (engine, seed), place in places.items()
            }
            runs_of = {key: run.result() for key, run in started.items()}
        means = []
        for engine in engines:
            found = [100 * runs_of[engine, seed].evaluations[-1].top1 for seed in seeds]
            seconds = [int((places[engine, seed] / "seconds").read_text()) for seed in seeds]
            means.append(sum(found) / len(found))
            good &= min(found) >= LEAST
            kind = "float32" if amp == "O0" else "bfloat16"
            print(
                f"| {workers} | {kind} | {engine} | {', '.join(f'{x:.1f}' for x in found)} | "
                f"{means[-1]:.2f} | {sum(seconds) / len(seconds):.0f} |",
                flush=True,
            )
        good &= max(means) - min(means) <= MAX_APART
    return int(not good and not flags.tiny)


if __name__ == "__main__":
    sys.exit(main())
