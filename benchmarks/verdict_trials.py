"""How often `accbench compare` is right where the truth is known.

Ten times `ddp` against itself, which should show no difference, and ten times against
a `ddp` that sleeps a tenth of what each step took, which should be called slower:

    python benchmarks/verdict_trials.py FOLDER [--tries 10] [--busy SECONDS] [--tiny]

Each try is a comparison at the defaults that a user gets, but for the numerics pass and the
round without input, which have no part in a verdict on speed; and one after the other, with
all cores. The same command goes on where it was stopped, and prints a line a try and at its
end the counts. A quiet machine is needed.

With `--busy 30` something else keeps one core busy for three seconds, again and again at random
moments, on the average every 30 s. Each line then has the rounds that were repeated. The last one
has what others took of the machine, over the windows of all tries: on a quiet machine, the noise
that the limits of `accbench.report.disturbance` must lie above.
"""

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
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


BUSY = "import time; end = time.monotonic() + 3\nwhile time.monotonic() < end: pass"


@contextlib.contextmanager
def busy_loops(every_s: float | None) -> Iterator[None]:
    """Keep a core busy for three seconds at random moments; None never does."""
    stopped = threading.Event()

    def begin_and_wait() -> None:
        while every_s is not None and not stopped.wait(random.expovariate(1 / every_s)):
            subprocess.run([sys.executable, "-c", BUSY], check=True)

    thread = threading.Thread(target=begin_and_wait)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def print_shares(found: list[comparison.Comparison]) -> None:
    """Print what others took of the machine in the windows of all runs."""
    runs = [
        run
        for one in found
        for row in one.rows
        for run in (*row.rounds, *(aside.run for aside in row.set_aside))
    ]
    shares = [
        w.other_cpu_share for run in runs for w in run.steady if w.other_cpu_share is not None
    ]
    if len(shares) > 1:
        print(
            f"others took of {len(shares)} windows: median {statistics.median(shares):.1%}, "
            f"19 of 20 below {statistics.quantiles(shares, n=20)[-1]:.1%}, most {max(shares):.1%}"
        )


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
    parser.add_argument("--busy", type=float, metavar="SECONDS", help="a busy loop every so often")
    add_tiny(parser)
    asked = parser.parse_args()
    folder, num_tries = asked.folder.absolute(), 1 if asked.tiny else asked.tries
    flags = (*FLAGS, *TINY_FLAGS) if asked.tiny else FLAGS
    plugins = folder / "plugins"
    if not plugins.exists():
        planted.install(plugins)
    right = dict.fromkeys(TRIALS, 0)
    found: list[comparison.Comparison] = []
    for number in range(1, num_tries + 1):
        for name, (engines, truth) in TRIALS.items():
            at = folder / f"{name}-{number:02}"
            with busy_loops(asked.busy):
                one_try(at, engines, plugins, flags)
            found.append(comparison.read(at))
            judged = analysis.judge(found[-1]).rows
            row = judged[1]
            low, high = row.speedup_ci95 or (0.0, 0.0)
            right[name] += row.verdict == truth
            print(
                f"{name} {number}: {row.verdict}, {row.speedup or 0:.3f} ({low:.3f} to "
                f"{high:.3f}) {len(row.samples_per_s_rounds)} rounds, "
                f"{sum(len(each.repeated_rounds) for each in judged)} repeated "
                f"{' '.join(row.reasons)}",
                flush=True,
            )
    for name, count in right.items():
        print(f"{name}: {count} of {num_tries} as they should be ({TRIALS[name][1]})")
    print_shares(found)
    return int(not asked.tiny and sum(right.values()) < 0.95 * num_tries * len(TRIALS))


if __name__ == "__main__":
    sys.exit(main())
