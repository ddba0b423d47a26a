"""What the launcher's setting of the C library's allocator is worth to a worker on a CPU.

    python benchmarks/research/huge_pages.py [--against TUNABLES] [--engine xla] [FLAGS OF A RUN]

Runs in turn with that setting and with another (none, or what is in TUNABLES as in GLIBC_TUNABLES),
in fresh processes; prints the ratio of their samples/s over the rounds: the geometric
mean and its 95 % interval by Student's t.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from accbench.report import run as runs  # noqa: E402
from accbench.report.statistics import mean_with_interval  # noqa: E402

FLAGS = (
    "--model=resnet18", "--image_size=96", "--batch_size=8", "--amp_level=O0", "--device=cpu",
    "--data=synthetic", "--max_steps=45", "--warmup_steps=5", "--nproc_per_node=2",
    "--save_interval=0",
)  # fmt: skip


def samples_per_s(flags: list[str], folder: Path, tunables: str | None) -> float:
    # What is set already the launcher leaves alone.
    environment = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    if tunables is not None:
        environment["GLIBC_TUNABLES"] = tunables
    subprocess.run(
        [sys.executable, str(ROOT / "launch_single_task.py"), *FLAGS, *flags,
         f"--output_dir={folder}"],
        env=environment, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    speed = runs.read(folder).samples_per_s
    assert speed is not None
    return speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--against", default="")
    arguments, flags = parser.parse_known_args()
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            speeds = {}
            for ours in (True, False) if number % 2 else (False, True):
                at = Path(folder) / f"{number}-{ours}"
                speeds[ours] = samples_per_s(flags, at, None if ours else arguments.against)
            ratios.append(speeds[True] / speeds[False])
            print(f"{speeds[True]:.1f} samples/s with, {speeds[False]:.1f} without", flush=True)
    ratio, (low, high) = mean_with_interval(ratios)
    print(f"the setting: {ratio:.3f}, 95 % interval {low:.3f} to {high:.3f}, {len(ratios)} rounds")


if __name__ == "__main__":
    main()
