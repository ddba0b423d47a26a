"""How often `accbench compare` is right where the truth is known.

Ten times `ddp` against itself, which should show no difference, and ten times against
a `ddp` that sleeps a tenth of what each step took, which should be called slower:

    python benchmarks/verdict_trials.py FOLDER [--tries 10] [--tiny]

Each try is a comparison at the defaults that a user gets, but for the numerics pass and the
round without input, which have no part in a verdict on speed; and one after the other, with
all cores. The same command goes on where it was stopped, and prints a line a try and at its
end the counts. A quiet machine is needed.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from accbench.report import analysis, comparison  # noqa: E402
from benchmarks import planted  # noqa: E402
from benchmarks.smoke import TINY_RUN, add_tiny  # noqa: E402

# name -> (engines, the right verdict)
TRIALS = {
    "same": ("ddp,ddp", "no difference shown"),
    "slowed": ("ddp,slowed", "slower"),
}
FLAGS = ("--device=cpu", "--numerics_steps=0", "--no-input_round")
TINY_FLAGS = (*TINY_RUN, "--data=synthetic", "--amp_level=O0", "--repeats=2", "--max_steps=6",
              "--warmup_steps=2", "--log_interval=2")  # fmt: skip


def one_try(folder: Path, engines: str, plugins: Path, flags: tuple[str, ...]) -> None:
    """Measure, or go on with what was begun."""
    if (folder / "report.json").exists():
        return
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(plugins), str(ROOT)))}
    done = subprocess.run(
        [sys.executable, "-m", "accbench", "compare", *flags, f"--engines={engines}",
         f"--output_dir={folder}"],
        cwd=ROOT, env=environment, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode not in (0, 1):  # 1: a row was not judged, which is counted
        raise SystemExit(f"accbench compare ended with status {done.returncode}")


def main() -> int:
    """Return 0 if 19 of 20 tries are right; with --tiny nothing is asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tries", type=int, default=10)
    add_tiny(parser)
    asked = parser.parse_args()
    folder, num_tries = asked.folder.absolute(), 1 if asked.tiny else asked.tries
    flags = (*FLAGS, *TINY_FLAGS) if asked.tiny else FLAGS
    plugins = folder / "plugins"
    if not plugins.exists():
        planted.install(plugins)
    right = dict.fromkeys(TRIALS, 0)
    for number in range(1, num_tries + 1):
        for name, (engines, truth) in TRIALS.items():
            at = folder / f"{name}-{number:02}"
            one_try(at, engines, plugins, flags)
            row = analysis.judge(comparison.read(at)).rows[1]
            low, high = row.speedup_ci95 or (0.0, 0.0)
            right[name] += row.verdict == truth
            print(
                f"{name} {number}: {row.verdict}, {row.speedup or 0:.3f} ({low:.3f} to "
                f"{high:.3f}) {' '.join(row.reasons)}",
                flush=True,
            )
    for name, count in right.items():
        print(f"{name}: {count} of {num_tries} as they should be ({TRIALS[name][1]})")
    return int(not asked.tiny and sum(right.values()) < 0.95 * num_tries * len(TRIALS))


if __name__ == "__main__":
    sys.exit(main())
