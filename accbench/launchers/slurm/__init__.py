"""A job of Slurm's: an sbatch script, in whose first node accbench starts one srun task a worker.

It is submitted and left to Slurm. Shortly before its time is over Slurm signals the tasks; they
save and end, and the job puts itself back into the queue, to go on from that checkpoint.
"""

import dataclasses
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from typing import ClassVar

from accbench import launchers, resolving
from accbench.config import RECORDS_FILE, TaskConfig
from accbench.errors import RequestError
from accbench.launchers import Failure
from accbench.launchers.slurm import script
from accbench.recording import records
from accbench.stop_signals import StopSignals

SCRIPT_FILE = "job.sh"
_POLL_S = 1.0


class Launcher(launchers.Launcher):
    """sbatch and srun."""

    restarts_workers = True  # by Slurm's requeueing
    elsewhere = True

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Options of the launcher slurm, which are sbatch's of the same name."""

        minimum: ClassVar[dict[str, float]] = {"signal_s": 1}

        partition: str | None = None
        """Where the job runs. Unset: the cluster's default."""
        account: str | None = None
        """Who pays."""
        time: str | None = None
        """The job's limit, as 4:00:00. Unset: the partition's."""
        signal_s: int = 120
        """Seconds before the limit in which the run is asked to save and end."""
        sbatch_args: str = ""
        """More flags of sbatch, in one string, quoted as in a shell: --qos=low --mem=64G."""

    @classmethod
    def problem(cls, task: TaskConfig) -> str | None:
        if not task.nnodes.isdigit() or int(task.nnodes) < 1:
            return f"--nnodes {task.nnodes}: with --launcher slurm it must be a number"
        if task.on_oom == "halve":
            return "--on_oom halve is not for --launcher slurm; lower --batch_size instead"
        if task.max_restarts:
            return "--max_restarts is not for --launcher slurm, which requeues by itself"
        try:
            shlex.split(task.options["slurm"].sbatch_args)
        except ValueError as error:
            return f"--slurm.sbatch_args: {error}"
        return None

    def resolve(self, task: TaskConfig) -> TaskConfig:
        if task.device == "auto":
            raise RequestError(
                "--launcher slurm needs --device cuda or --device cpu, for this machine is not the "
                "one that trains"
            )
        # What depends on the machine is left open, for the job to find.
        filled = resolving.apply_defaults(task, task.device)
        return dataclasses.replace(filled, threads=task.threads, workers=task.workers)

    def script(self, task: TaskConfig, worker: list[str]) -> str:
        folder = Path(task.output_dir or "runs/NAME").absolute()
        return script.text(task, worker, folder, is_held=False)

    def launch(self, task: TaskConfig, worker: list[str]) -> Failure | None:
        if shutil.which("sbatch") is None:
            raise RequestError(
                "--launcher slurm needs Slurm's sbatch, which is not here: run it where jobs are "
                "submitted, or print the script by --dry_run"
            )
        path = task.run_dir / SCRIPT_FILE
        try:
            path.write_text(script.text(task, worker, task.run_dir, self.attached))
        except OSError as error:
            raise RequestError(f"cannot write {path}: {error.strerror}") from None
        done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True)
        if done.returncode:
            raise RequestError(f"sbatch refused {path}: {' '.join(done.stderr.split())}")
        job = done.stdout.strip().split(";")[0]
        print(f"submitted job {job}; it goes into {task.run_dir}", flush=True)
        return _ended(job, task.run_dir) if self.attached else None


def state_of(job: str) -> str:
    """The job's state in squeue's words; empty when it is over and gone."""
    done = subprocess.run(
        ["squeue", "--noheader", f"--jobs={job}", "--format=%T"], capture_output=True, text=True
    )
    return done.stdout.strip()


def _ended(job: str, run_dir: Path) -> Failure | None:
    """Wait for the job's end; a signal cancels it."""
    with StopSignals() as signals:
        while state_of(job) not in ("", "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"):
            if signals.wish or signals.order:
                subprocess.run(["scancel", job])
            time.sleep(_POLL_S)
    path = run_dir / RECORDS_FILE
    ends = [r for r in records.read(path) if isinstance(r, records.EndRecord)]
    if ends and ends[-1].status == "ok":
        return None
    why = ends[-1].error if ends else "it wrote no end; see its log"
    return Failure(
        ends[-1].status if ends else "error", f"job {job}: {why}", is_recorded=bool(ends)
    )
