"""Workers in a Slurm job: an sbatch script, on whose first node accbench starts them by srun.

The job is submitted and left to Slurm. Shortly before its time limit Slurm signals the tasks; they
save a checkpoint and end, and the job requeues itself to continue from there.
"""

import dataclasses
import shlex
import shutil
import subprocess
import time
from pathlib import Path

from accbench import launchers, resolving
from accbench.config import RECORDS_FILE, TaskConfig
from accbench.config.field import flag
from accbench.errors import RequestError
from accbench.launchers import Failure
from accbench.launchers.slurm import script
from accbench.recording import records
from accbench.system.stop_signals import StopSignals

SCRIPT_FILE = "job.sh"
_POLL_S = 1.0
# Seconds without an answer from squeue after which a job is given up. A controller that is started
# again, or whose backup takes over, answers within minutes.
_NO_ANSWER_S = 600.0
_OVER = ("", "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")


class Launcher(launchers.Launcher):
    """A launcher that submits a Slurm job, with one srun task per worker."""

    restarts_workers = True  # by Slurm's requeueing
    elsewhere = True
    starts_later = True

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Options of the launcher slurm, which are sbatch's of the same name."""

        partition: str | None = flag(None, "The job's partition. Unset: the cluster's default.")
        account: str | None = flag(None, "The account to charge.")
        time: str | None = flag(None, "The job's time limit, as 4:00:00. Unset: the partition's.")
        signal_s: int = flag(
            120,
            "Seconds before the time limit at which the run is told to save and end.",
            minimum=1,
        )
        sbatch_args: str = flag(
            "",
            "More flags of sbatch, in one string, quoted as in a shell: --qos=low --mem=64G.",
        )

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
                "--launcher slurm needs --device cuda or --device cpu, because this machine is not "
                "the one that trains"
            )
        # The job itself determines what depends on the machine.
        filled = resolving.apply_defaults(task, task.device)
        return dataclasses.replace(filled, threads=task.threads, workers=task.workers)

    def script(self, task: TaskConfig, worker: list[str]) -> str:
        folder = Path(task.output_dir or "runs/NAME").absolute()
        return script.render(task, worker, folder, is_held=False)

    def launch(self, task: TaskConfig, worker: list[str]) -> Failure | None:
        if shutil.which("sbatch") is None:
            raise RequestError(
                "--launcher slurm needs Slurm's sbatch, which is not installed here: run it where "
                "jobs are submitted, or print the script with --dry_run"
            )
        path = task.run_dir / SCRIPT_FILE
        try:
            path.write_text(script.render(task, worker, task.run_dir, self.attached))
        except OSError as error:
            raise RequestError(f"cannot write {path}: {error.strerror}") from None
        done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True)
        if done.returncode:
            raise RequestError(f"sbatch refused {path}: {' '.join(done.stderr.split())}")
        job = done.stdout.strip().split(";")[0]
        print(f"submitted job {job}; its output goes to {task.run_dir}", flush=True)
        return _wait_for_job(job, task.run_dir) if self.attached else None


def job_state(job: str) -> str:
    """Return the job's state as squeue prints it; empty when the job is over and gone.

    Raises:
        RequestError: squeue does not know; the message is its own.
    """
    done = subprocess.run(
        ["squeue", "--noheader", f"--jobs={job}", "--format=%T"], capture_output=True, text=True
    )
    if done.returncode and "Invalid job id" not in done.stderr:
        raise RequestError(f"squeue failed: {' '.join(done.stderr.split())}")
    return done.stdout.strip()


def _wait_for_job(job: str, run_dir: Path) -> Failure | None:
    """Wait for the job's end; a signal to this process cancels the job."""
    with StopSignals() as signals:
        answered = time.monotonic()
        while True:
            try:
                if job_state(job) in _OVER:
                    break
                answered = time.monotonic()
            except RequestError as error:
                if time.monotonic() - answered > _NO_ANSWER_S:
                    return _give_up(job, str(error))
            if signals.graceful or signals.forced:
                subprocess.run(["scancel", job])
            time.sleep(_POLL_S)
    path = run_dir / RECORDS_FILE
    logs = run_dir / "logs"
    if not path.exists():
        # The job writes down a failure, so that this one ended before it could.
        early = f"it ended before it wrote a record; see its log in {logs}, or scontrol show job"
        return Failure("error", f"job {job}: {early}")
    ends = [r for r in records.read(path) if isinstance(r, records.EndRecord)]
    if ends and ends[-1].status == "ok":
        return None
    why = ends[-1].error if ends else f"its record has no end; see its log in {logs}"
    return Failure(
        ends[-1].status if ends else "error", f"job {job}: {why}", is_recorded=bool(ends)
    )


def _give_up(job: str, why: str) -> Failure:
    """Cancel a job of which nothing is known, so that no other one runs beside it."""
    subprocess.run(["scancel", job])
    why = f"job {job} is given up after {_NO_ANSWER_S:.0f} s: {why}; scancel {job} if it still runs"
    # The job itself may still write its record.
    return Failure("error", why, exit_status=2, is_recorded=True)
