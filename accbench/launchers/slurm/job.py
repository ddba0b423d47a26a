"""The job's process on its first node: it runs the workers by srun, and completes the record."""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

from accbench import config, launchers, resolving
from accbench.config import TaskConfig
from accbench.errors import (
    ERROR_FILE_VARIABLE,
    MEETING_VARIABLE,
    STOPPED_STATUS,
    RequestError,
    print_refusal,
)  # fmt: skip
from accbench.launchers import Failure
from accbench.launchers.common import failures
from accbench.recording import run_folder
from accbench.system import folders
from accbench.system.stop_signals import StopSignals
from accbench.training import resume

_POLL_S = 0.2
# Seconds in which the other workers may end by themselves after one has failed.
_GRACE_S = 5.0


def main() -> None:
    """Run the job.

    The arguments are the run's folder, whether the submitter holds it (held or free), which
    checkpoint to go on from (auto, or as-written in the task), and a worker's command.
    """
    folder, held, resumed, *worker = sys.argv[1:]
    if resumed not in ("auto", "as-written"):  # submitted by accbench from before there was this
        resumed, worker = "as-written", [resumed, *worker]
    run_dir = Path(folder)
    task = config.parse([f"--config={run_dir / config.CONFIG_FILE}"])
    if resumed == "auto":
        task = dataclasses.replace(task, resume="auto")
    try:
        with contextlib.nullcontext() if held == "held" else folders.lock(run_dir):
            try:
                task = _resolve_task(task)
                failure = _srun(task, worker)
            except RequestError as error:
                failure = Failure("error", str(error), exit_status=2)
            status = launchers.conclude(run_dir, failure)
    except RequestError as error:  # another job holds the folder, and its record
        status = print_refusal("accbench", error)
    if status == STOPPED_STATUS and _is_time_over(task):
        job = os.environ["SLURM_JOB_ID"]
        print(f"the job's time is over: requeueing {job} to resume its checkpoint", flush=True)
        subprocess.run(["scontrol", "requeue", job])
    sys.exit(status)


def _resolve_task(task: TaskConfig) -> TaskConfig:
    """Resolve the task on this node, with the newest checkpoint by now.

    A named checkpoint is taken only the first time, before Slurm has requeued the job.
    """
    task = resolving.resolve(task)
    if task.resume == "auto" or int(os.environ.get("SLURM_RESTART_COUNT", 0)):
        return resume.with_newest_checkpoint(task, lambda line: print(line, flush=True))
    run_folder.write(task)
    return task


def _srun(task: TaskConfig, worker: list[str]) -> Failure | None:
    """Run the workers by srun, one per task, until all have ended."""
    num_workers = int(os.environ["SLURM_NTASKS"])
    attempt = f"{os.environ['SLURM_JOB_ID']}-{os.environ.get('SLURM_RESTART_COUNT', 0)}"
    # On the run's disk, which all nodes share.
    job_dir = task.run_dir / f".job-{attempt}"
    job_dir.mkdir(exist_ok=True)
    error_files = {rank: job_dir / f"rank{rank}.error.json" for rank in range(num_workers)}
    if (problem := failures.reserve(error_files.values())) is not None:
        return problem
    # Since Slurm 22.05 srun does not take over the number that sbatch was given.
    cpus = os.environ.get("SLURM_CPUS_PER_TASK")
    environment = {
        **launchers.common_env(task),
        **({} if cpus is None else {"SRUN_CPUS_PER_TASK": cpus}),
        **os.environ,
        ERROR_FILE_VARIABLE: str(job_dir / "rank{rank}.error.json"),
        MEETING_VARIABLE: f"file:{job_dir / 'meeting'}",
    }  # fmt: skip
    command = [
        "srun", f"--ntasks={num_workers}",
        sys.executable, "-u", *worker, f"--config={task.run_dir / config.CONFIG_FILE}",
    ]  # fmt: skip
    with StopSignals() as signals:
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        was_told = _wait(process, error_files.values(), signals)
    failed = {rank: 1 for rank, path in error_files.items() if failures.read_error(path)}
    was_told = was_told or bool(signals.graceful)
    failure = _first_failure(process.returncode, failed, error_files, was_told)
    for path in (*job_dir.iterdir(),):
        path.unlink()
    with contextlib.suppress(OSError):
        job_dir.rmdir()
    if failure is not None and failure.status == "error" and signals.graceful:
        return Failure("interrupted", f"stopped by {signals.graceful.name}", exit_status=130)
    return failure


def _wait(
    process: "subprocess.Popen[bytes]", error_files: Collection[Path], signals: StopSignals
) -> bool:
    """Wait for srun's end; after a worker has failed, the others get a few seconds.

    srun's --kill-on-bad-exit would also kill a rank that is still writing a checkpoint after
    another has stopped.

    Returns:
        Whether the workers were told to end.
    """
    failed_at: float | None = None
    was_told = False
    while process.poll() is None:  # Slurm itself signals the tasks
        time.sleep(_POLL_S)
        errors = [error for path in error_files if (error := failures.read_error(path))]
        if failed_at is None and any(error["name"] != "StoppedError" for error in errors):
            failed_at = time.monotonic()
        is_overdue = failed_at is not None and time.monotonic() - failed_at > _GRACE_S
        if signals.forced or is_overdue:
            process.terminate()  # which srun forwards
            failed_at = time.monotonic()
            was_told = True
    return was_told


def _first_failure(
    exit_status: int, failed: dict[int, int], error_files: dict[int, Path], was_told: bool
) -> Failure | None:
    """Return why the workers failed.

    Args:
        exit_status: srun's, the highest of the workers', which is above 128 for a signal.
        failed: the ranks that wrote an error.
        error_files: the ranks' files for their errors.
        was_told: whether the workers were told to end, after which Slurm may kill them.
    """
    if exit_status == 0:
        return None
    killed_by = _signal_name(exit_status)
    # Other ranks write their errors about the loss of one that was killed and wrote none.
    was_killed = killed_by not in (None, "SIGTERM", "SIGINT") and len(failed) < len(error_files)
    if failed and (was_told or not was_killed):
        return failures.first_failure(failed, error_files)
    how = "ended" if killed_by is None else f"was killed by {killed_by}"
    return Failure("error", f"a worker {how} (srun's status {exit_status}); see the job's log")


def _signal_name(exit_status: int) -> str | None:
    """Return the signal that an exit status tells of; None if it is no signal's."""
    try:
        return signal.Signals(exit_status - 128).name
    except ValueError:
        return None


def _is_time_over(task: TaskConfig) -> bool:
    """Return whether Slurm ended this job at its time limit, and nobody else did."""
    job = os.environ["SLURM_JOB_ID"]
    done = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True)
    state, end = (re.search(rf"{name}=(\S+)", done.stdout) for name in ("JobState", "EndTime"))
    if state is None or end is None or state[1] != "RUNNING":
        return False
    try:
        ends_at = time.mktime(time.strptime(end[1], "%Y-%m-%dT%H:%M:%S"))
    except ValueError:  # Unknown
        return False
    signal_s: int = task.options["slurm"].signal_s
    # Slurm may send the signal up to a minute early (sbatch(1), --signal).
    return ends_at - time.time() < signal_s + 60
