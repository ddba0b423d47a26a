"""Jobs of a comparison, run to their ends: alone, a round's in turn, or side by side."""

import contextlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from accbench import config
from accbench.comparing import jobs, passes, side_by_side
from accbench.comparing.run import JobProcess, ended_on_interrupt
from accbench.comparing.turns import TurnGiver, take_turns
from accbench.config import plugins
from accbench.recording import records
from accbench.report import run as runs


def run(job: jobs.Job, cache: Path) -> runs.RecordedRun:
    """Run a job in a process of its own, and return its record, also when the job failed."""
    shutil.rmtree(job.folder, ignore_errors=True)
    if job.kind == "copy":
        passes.copy_without_draws(Path(job.argument), job.folder)
        return runs.read_if_there(job.folder)
    process = _prepare(job, cache)
    with ended_on_interrupt([process]) as stop:
        process.start(stop)
        return _record_of(job, process)


def run_in_turns(together: Sequence[jobs.Job], caches: Sequence[Path]) -> list[runs.RecordedRun]:
    """Run the jobs of a round, whose windows take turns, and return their records."""
    with contextlib.ExitStack() as stack:
        givers, processes = [], []
        for job, cache in zip(together, caches, strict=True):
            shutil.rmtree(job.folder, ignore_errors=True)
            givers.append(TurnGiver(job.task["nproc_per_node"]))
            stack.callback(givers[-1].close)
            processes.append(_prepare(job, cache, givers[-1].path))
        stop = stack.enter_context(ended_on_interrupt(processes))
        take_turns(processes, givers, stop)
        return [_record_of(job, one) for job, one in zip(together, processes, strict=True)]


def run_side_by_side(
    together: Sequence[jobs.Job], caches: Sequence[Path], needed_bytes: Sequence[int | None],
    tell: Callable[[jobs.Job, runs.RecordedRun], None],
) -> list[runs.RecordedRun]:  # fmt: skip
    """Run jobs that nobody times, some at once, and return their records.

    Args:
        together: the jobs.
        caches: the folder of each one's compile cache.
        needed_bytes: the memory that each one needs; None: not known, so that it runs alone.
        tell: called with a job and its record as it ends.
    """
    for job in together:
        shutil.rmtree(job.folder, ignore_errors=True)
    processes = [_prepare(job, cache) for job, cache in zip(together, caches, strict=True)]
    found: dict[int, runs.RecordedRun] = {}

    def ended(index: int) -> None:
        found[index] = _record_of(together[index], processes[index])
        tell(together[index], found[index])

    with ended_on_interrupt(processes) as stop:
        side_by_side.run_all(processes, needed_bytes, stop, ended)
    return [found[index] for index in range(len(together))]


def _prepare(job: jobs.Job, cache: Path, turns: Path | None = None) -> JobProcess:
    """Make a job's folder and log, empty its caches before round 1, and return its process."""
    if job.number == 1:
        shutil.rmtree(cache, ignore_errors=True)
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    log = log_of(job.folder)
    log.write_bytes(b"")  # a launcher that is killed at once leaves none
    flags, task = config.as_flags(job.task), config.task_of_values(job.task)
    num_devices: int | None = 0
    if task.device == "cuda":
        num_devices = task.nproc_per_node * config.devices_per_worker(task)
    if plugins.load("launchers", job.task["launcher"]).elsewhere:
        num_devices = None  # the run is on other machines
    return JobProcess(job.kind, job.argument, flags, job.folder, log, num_devices, turns)


def _record_of(job: jobs.Job, process: JobProcess) -> runs.RecordedRun:
    """Wait for a job's end, and return its record, completed where its launcher was killed."""
    exit_status = process.join()
    path = job.folder / config.RECORDS_FILE
    path.parent.mkdir(exist_ok=True)
    if runs.read_if_there(job.folder).end is None:
        lines = log_of(job.folder).read_text(encoding="utf-8", errors="replace").strip()
        why = lines.splitlines()[-1] if lines else f"exit status {exit_status}"
        records.append(path, records.EndRecord("error", why))
    return runs.read(job.folder)


def log_of(folder: Path) -> Path:
    """Return the file for the output of the launcher of a run."""
    return folder.parent / f"{folder.name}.log"
