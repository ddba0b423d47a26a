"""How often `accbench compare` is right where the truth is known.

Ten times `ddp` against itself, which should show no difference, and ten times against
a `ddp` that sleeps a tenth of what each step took, which should be called slower:

    python benchmarks/verdict_trials.py FOLDER

Each try is a comparison of its own in FOLDER, on a core of its own, as many at once as
there are cores; the same command goes on where it was stopped, and prints a line a try
and at its end the counts. A quiet machine is needed.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from accbench.report import analysis, comparison  # noqa: E402
from tests import planted  # noqa: E402

NUM_TRIES = 10
# name -> (engines, the right verdict)
TRIALS = {
    "same": ("ddp,ddp", "no difference shown"),
    "slowed": ("ddp,slowed", "slower"),
}
FLAGS = (
    "--model=tests.nets:tiny", "--image_size=64", "--batch_size=32", "--amp_level=O0",
    "--data=synthetic", "--device=cpu", "--threads=1", "--workers=0", "--max_steps=520",
    "--warmup_steps=20", "--log_interval=50", "--repeats=10", "--numerics_steps=0",
)  # fmt: skip


def one_try(folder: Path, engines: str, plugins: Path) -> None:
    """Measure, or go on with what was begun."""
    if (folder / "report.json").exists():
        return
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(plugins), str(ROOT)))}
    subprocess.run(
        [sys.executable, "-m", "accbench", "compare", *FLAGS, f"--engines={engines}",
         f"--output_dir={folder}"],
        cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def main() -> int:
    """Returns 0 if nine of ten tries of each kind are right."""
    folder = Path(sys.argv[1]).absolute()
    plugins = folder / "plugins"
    if not plugins.exists():
        planted.install(plugins)
    cores: SimpleQueue[int] = SimpleQueue()
    for core in os.sched_getaffinity(0):
        cores.put(core)

    def on_a_core(name: str, number: int) -> tuple[str, bool, str]:
        engines, truth = TRIALS[name]
        core = cores.get()
        try:
            os.sched_setaffinity(0, {core})  # of this thread, and of what it starts
            at = folder / f"{name}-{number:02}"
            one_try(at, engines, plugins)
        finally:
            cores.put(core)
        row = analysis.judge(comparison.read(at)).rows[1]
        low, high = row.speedup_ci95 or (0.0, 0.0)
        line = (
            f"{name} {number}: {row.verdict}, {row.speedup or 0:.3f} ({low:.3f} to "
            f"{high:.3f}) {' '.join(row.reasons)}"
        )
        return name, row.verdict == truth, line

    right = dict.fromkeys(TRIALS, 0)
    tries = [(name, number) for number in range(1, NUM_TRIES + 1) for name in TRIALS]
    with ThreadPoolExecutor(cores.qsize()) as pool:
        for name, is_right, line in pool.map(on_a_core, *zip(*tries, strict=True)):
            right[name] += is_right
            print(line, flush=True)
    for name, count in right.items():
        print(f"{name}: {count} of {NUM_TRIES} as they should be ({TRIALS[name][1]})")
    return int(min(right.values()) < 0.9 * NUM_TRIES)


if __name__ == "__main__":
    sys.exit(main())
