"""Measure what a checkpoint costs: training's pause, the writing, and the start after a kill.

    python benchmarks/checkpoint_cost.py FOLDER [--tiny] [flags of a run]

Runs a ResNet-50 with AdamW (or what the flags say) with a checkpoint every four steps, kills
the launcher behind the second, and goes on. Prints each checkpoint beside the median step.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from accbench.errors import RequestError  # noqa: E402
from accbench.recording import records  # noqa: E402
from benchmarks.smoke import TINY_RUN, add_tiny  # noqa: E402

FLAGS = (
    "--model=resnet50", "--image_size=224", "--batch_size=8", "--amp_level=O0", "--data=synthetic",
    "--warmup_steps=1", "--log_interval=1", "--save_steps=4", "--max_steps=16", "--resume=auto",
)  # fmt: skip
# Steps must last long enough to be killed between two of them.
TINY_FLAGS = (*TINY_RUN, "--model=benchmarks.nets:slow_dropping", "--max_steps=10")
TINY_STEP_S = 0.1


def of_kind(folder: Path, kind: type) -> list:
    try:
        return [r for r in records.read(folder / "records.jsonl") if isinstance(r, kind)]
    except RequestError:
        return []


def main() -> int:
    """Return 0 if no checkpoint stalled training for longer than a step takes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    add_tiny(parser)
    asked, flags = parser.parse_known_args()
    folder, tiny = asked.folder.absolute(), TINY_FLAGS if asked.tiny else ()
    command = [sys.executable, "launch_single_task.py", *FLAGS, *tiny, *flags,
               f"--output_dir={folder}"]  # fmt: skip
    env = {"SLOW_NET_S": str(TINY_STEP_S), **os.environ}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
    while len(of_kind(folder, records.CheckpointRecord)) < 2 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    killed = time.monotonic()
    num_steps = len(of_kind(folder, records.WindowRecord))
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
    while process.poll() is None and not of_kind(folder, records.ResumeRecord):
        time.sleep(0.02)
    (resumed,) = of_kind(folder, records.ResumeRecord)
    while len(of_kind(folder, records.WindowRecord)) <= resumed.step and process.poll() is None:
        time.sleep(0.02)
    again_s = time.monotonic() - killed
    process.wait()
    windows = [w for w in of_kind(folder, records.WindowRecord) if not w.warmup]
    step_s = statistics.median(w.wall_s / w.num_steps for w in windows)
    saved = of_kind(folder, records.CheckpointRecord)
    print(f"a step takes {step_s:.2f} s (median of {len(windows)})")
    for one in saved:
        print(
            f"step {one.step}: {one.num_bytes / 2**20:.0f} MiB, training stood still for "
            f"{one.stall_s:.2f} s ({one.stall_s / step_s:.2f} steps), "
            f"written in {one.write_s:.1f} s"
        )
    print(
        f"killed after step {num_steps}, first step after step {resumed.step} {again_s:.1f} s later"
    )
    return int(max(one.stall_s for one in saved) >= step_s)


if __name__ == "__main__":
    sys.exit(main())
