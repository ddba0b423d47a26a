"""A short training, killed at random moments and started again, beside one that nobody disturbed.

    python benchmarks/kill_soak.py FOLDER [--kills 300] [--seed 0] [--tiny]

Two workers on mock images, a checkpoint every three steps. Each try runs the launcher with
`--resume auto` and kills, after a random time, by turns of chance: the launcher or a rank by
SIGKILL, or the launcher by SIGTERM. At its end the run must have the undisturbed one's losses,
bit for bit, every step once, and have left no process and no temporary file. The same FOLDER
goes on where it was stopped. Prints a line every ten kills, and what it found at its end.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from accbench.data import mock_images  # noqa: E402
from accbench.errors import RequestError  # noqa: E402
from accbench.recording import records  # noqa: E402
from benchmarks.smoke import add_tiny  # noqa: E402

FLAGS = (
    "--model=benchmarks.nets:slow_dropping", "--image_size=32", "--batch_size=4", "--amp_level=O0",
    "--workers=0", "--threads=1", "--nproc_per_node=2", "--warmup_steps=1", "--log_interval=1",
    "--lr=0.01", "--save_steps=3", "--epochs=100000",
)  # fmt: skip
# The net sleeps so long a step, or the run would be over before it is killed.
STEP_S = 0.2
# Of each kill: what is killed, and how.
WAYS = (("launcher", signal.SIGKILL), ("rank", signal.SIGKILL), ("launcher", signal.SIGTERM))


def start(folder: Path, images: Path, num_steps: int, step_s: float) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SLOW_NET_S": str(step_s)}
    return subprocess.Popen(
        [sys.executable, "launch_single_task.py", *FLAGS, f"--max_steps={num_steps}",
         f"--data=imagefolder:{images}", f"--output_dir={folder}", "--resume=auto"],
        cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def ranks_of(launcher: subprocess.Popen) -> list[psutil.Process]:
    try:
        return psutil.Process(launcher.pid).children()
    except psutil.NoSuchProcess:
        return []


def losses(folder: Path) -> list[float]:
    try:
        found = records.read(folder / "records.jsonl")
    except RequestError:  # nothing was written yet
        return []
    windows = [record for record in found if isinstance(record, records.WindowRecord)]
    assert [window.first_step for window in windows] == list(range(len(windows))), "steps lost"
    return [window.loss for window in windows]


def seconds_to_steps(folder: Path, launcher: subprocess.Popen, limit_s: float) -> float | None:
    """Until the first new step; None if there was none by then, or it ended."""
    began = time.monotonic()
    before = len(losses(folder))
    while (waited_s := time.monotonic() - began) < limit_s and launcher.poll() is None:
        if len(losses(folder)) > before:
            return waited_s
        time.sleep(0.2)
    return None


def left_over(folder: Path) -> list[str]:
    """Processes and temporary files of the run that are still there."""
    found = [str(path) for path in (folder / "checkpoints").glob(".*")]
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and str(folder) in "\0".join(process.cmdline()):
                found.append(f"process {process.pid}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def main() -> int:
    """Return 0 if nothing was lost and nothing is left."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--steps_per_kill", type=float, default=40)
    parser.add_argument("--seed", type=int, default=0)
    add_tiny(parser)
    flags = parser.parse_args()
    if flags.tiny:
        flags.kills, flags.steps_per_kill = 1, 10
    folder, chance = flags.folder.absolute(), random.Random(flags.seed)
    images, killed = folder / "images", folder / "killed"
    if not images.exists():
        mock_images.make(images, mock_images.MockImagePlan(num_classes=3, num_train=16, num_val=4))
    num_steps = int(flags.kills * flags.steps_per_kill) + 20
    began, num_kills, by_way, errors = time.monotonic(), 0, dict.fromkeys(WAYS, 0), []
    num_hit = 0
    start_s = 6.0
    while num_kills < flags.kills:
        process = start(killed, images, num_steps, STEP_S)
        target, number = chance.choice(WAYS)
        # So that about half of the kills hit steps, and the others what is before them.
        wait_s = chance.uniform(0.0, 2.0 * start_s)
        took_s = seconds_to_steps(killed, process, wait_s)
        if took_s is not None:
            start_s = 0.8 * start_s + 0.2 * took_s
            num_hit += 1
        try:
            _, stderr = process.communicate(timeout=max(wait_s - (took_s or wait_s), 0.0))
        except subprocess.TimeoutExpired:
            ranks = ranks_of(process)
            if target == "rank" and ranks:
                chance.choice(ranks).send_signal(number)
            else:
                target = "launcher"
                process.send_signal(number)
            _, stderr = process.communicate()
            num_kills += 1
            by_way[target, number] += 1
        else:
            if process.returncode != 0:
                errors.append(stderr.strip()[-300:])
                break
            print(f"reached its end after {num_kills} kills", flush=True)
            break
        psutil.wait_procs(ranks, timeout=30)
        if "Traceback" in stderr or process.returncode == 2:
            errors.append(f"kill {num_kills}: {stderr.strip()[-400:]}")
        if num_kills % 10 == 0:
            print(f"{num_kills} kills, {len(losses(killed))} of {num_steps} steps, "
                  f"{time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
    for run_dir in (killed, folder / "undisturbed"):
        process = start(run_dir, images, num_steps, 0.0)
        _, stderr = process.communicate()
        if process.returncode != 0:
            errors.append(f"{run_dir.name}: {stderr.strip()[-400:]}")
    own, expected = losses(killed), losses(folder / "undisturbed")
    same = own == expected and len(own) == num_steps
    leftovers = left_over(killed)
    ways = ", ".join(f"{target} {number.name} {n}" for (target, number), n in by_way.items())
    print(
        f"{num_kills} kills ({ways}), {num_hit} of them behind a new step, in "
        f"{time.monotonic() - began:.0f} s; losses of {len(own)} steps "
        f"{'equal bit for bit' if same else 'DIFFER'}; left over: {leftovers or 'nothing'}"
    )
    for error in errors:
        print(f"unexpected: {error}")
    return int(not same or bool(leftovers) or bool(errors))


if __name__ == "__main__":
    sys.exit(main())
