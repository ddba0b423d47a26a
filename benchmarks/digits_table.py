"""Does every engine learn? recipes/digits.yaml to its end, by engine, workers, type and seed.

    python benchmarks/digits_table.py FOLDER [--engines ddp,inductor,xla] [--seeds 3]

Prints a Markdown table of top-1 on the held-out digits, in per cent, and of the seconds of a run;
the same command goes on where it was stopped.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from accbench.data import digits  # noqa: E402
from accbench.report import run as runs  # noqa: E402

# Points between the engines' means that are more than chance, and what all must reach.
MAX_APART, LEAST = 0.5, 98.0


def train(folder: Path, data: Path, engine: str, workers: int, amp: str, seed: int) -> runs.Run:
    """One run, unless it is there already; its seconds are in FOLDER/seconds."""
    if runs.read_if_there(folder).status != "ok":
        began = time.monotonic()
        subprocess.run(
            [sys.executable, "launch_single_task.py", "--config=recipes/digits.yaml",
             f"--data=imagefolder:{data}", f"--engine={engine}", f"--nproc_per_node={workers}",
             f"--amp_level={amp}", f"--seed={seed}", "--batch_size", str(32 // workers),
             "--workers=0", "--save_interval=0", f"--output_dir={folder}"],
            cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        (folder / "seconds").write_text(f"{time.monotonic() - began:.0f}")
    return runs.read(folder)


def main() -> int:
    """Returns 0 if all reach what they must, and the engines agree."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engines", default="ddp,inductor,xla")
    parser.add_argument("--seeds", type=int, default=3)
    flags = parser.parse_args()
    data = flags.folder.absolute() / "digits"
    digits.make(data)
    print("| workers | type | engine | top-1, by seed | mean | seconds a run |")
    print("| ---: | --- | --- | --- | ---: | ---: |")
    good = True
    for workers in (1, 2):
        for amp in ("O0", "O1"):
            means = []
            for engine in flags.engines.split(","):
                found, seconds = [], []
                for seed in range(flags.seeds):
                    at = flags.folder.absolute() / f"{engine}-{workers}-{amp}-{seed}"
                    run = train(at, data, engine, workers, amp, seed)
                    found.append(100 * run.evaluations[-1].top1)
                    seconds.append(int((at / "seconds").read_text()))
                means.append(sum(found) / len(found))
                good &= min(found) >= LEAST
                kind = "float32" if amp == "O0" else "bfloat16"
                print(
                    f"| {workers} | {kind} | {engine} | {', '.join(f'{x:.1f}' for x in found)} | "
                    f"{means[-1]:.2f} | {sum(seconds) / len(seconds):.0f} |",
                    flush=True,
                )
            good &= max(means) - min(means) <= MAX_APART
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
