"""The launcher contract: what starts the workers and sees them end.

`accbench/launchers/<name>.py` defines `class Launcher` with `launch`. The
helpers here are what every launcher tells a person and the record.
"""

import abc
import dataclasses
import sys
from pathlib import Path

import accbench
from accbench import config, plugins
from accbench.config import TaskConfig
from accbench.errors import RequestError
from accbench.recording import records


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a run did not end well."""

    status: str
    """As in the end record."""
    error: str
    """One line."""
    traceback: str = ""
    exit_status: int = 1
    is_recorded: bool = False
    """Whether the record has this end already."""
    at: float = 0.0
    """Unix time of what a worker raised; 0 where nothing was raised, as in one that was killed."""

    @property
    def may_be_tried_again(self) -> bool:
        """Whether workers started again, from the newest checkpoint, may end otherwise."""
        return self.exit_status == 1 and self.status == "error"


WORKER = ("-m", "accbench.training.worker_process")
"""Arguments to the Python interpreter that start a worker."""


class Launcher(abc.ABC):
    """Starts one worker a device with the environment that the engine asks for."""

    restarts_workers = False
    """Whether `--max_restarts` is this launcher's own to keep."""
    elsewhere = False
    """Whether workers are no processes of this one's, and perhaps on other machines."""
    attached = False
    """Whether `launch` is to return when the run has ended, and no sooner."""

    def script(self, task: TaskConfig, worker: list[str]) -> str:
        """What `--dry_run` prints: that which would be submitted.

        Raises:
            RequestError: this launcher submits nothing.
        """
        raise RequestError(
            f"--dry_run is not for --launcher {task.launcher}, which submits nothing"
        )

    def resolve(self, task: TaskConfig) -> TaskConfig:
        """What the machine that trains makes of a task, by `resolving.resolve` there.

        Raises:
            RequestError: the task cannot run there; the message says why and what to do.
        """
        from accbench import resolving

        return resolving.resolve(task)

    @classmethod
    def problem(cls, task: TaskConfig) -> str | None:
        """What is wrong with the flags of this launcher, and the remedy; None if nothing is."""
        return None

    def joined(self, task: TaskConfig) -> "Joined | None":
        """A run that was begun elsewhere and that this process takes part in; None to begin one.

        Raises:
            NoMoreRunsError: there is none any more, of several one after the other.
            RequestError: it cannot be joined.
        """
        return None

    def follows(self, task: TaskConfig) -> bool:
        """Whether this process only takes part in what another has begun, run after run."""
        return False

    def farewell(self, task: TaskConfig) -> None:
        """Tell those who take part that no more runs follow."""
        return

    @abc.abstractmethod
    def launch(self, task: TaskConfig, worker: list[str]) -> Failure | None:
        """Run the workers to their end; nothing of them is left when this returns.

        Args:
            task: resolved, its folder made.
            worker: arguments to the Python interpreter that start a worker.

        Raises:
            RequestError: nothing could be started.
        """


@dataclasses.dataclass(frozen=True)
class Joined:
    """A run whose folder and record are kept elsewhere."""

    task: TaskConfig
    worker: list[str]
    """Arguments to the Python interpreter that start a worker."""


def resolve(task: TaskConfig) -> TaskConfig:
    """What the machine that trains makes of a task, which is its launcher's to ask.

    Raises:
        RequestError: the task cannot run there, or there is no such launcher.
    """
    launcher: Launcher = plugins.load("launchers", task.launcher)()
    return launcher.resolve(task)


def anywhere(worker: list[str]) -> list[str]:
    """What starts a worker, as another machine knows it: a module; main.py is elsewhere there."""
    return worker if worker[0] == "-m" else list(WORKER)


def what_runs() -> dict[str, str]:
    """What must be the same on all machines of a run."""
    import torch

    return {"accbench": accbench.__version__, "torch": torch.__version__}


def main_of(module: str) -> list[str]:
    """Arguments to the Python interpreter that call `main` of a module of accbench's.

    As `-m` does, but for the current folder, where a file of a user's hides the module of its
    name that torch imports: that comes last.
    """
    return ["-c", f"{_CURRENT_FOLDER_LAST}from {module} import main\nmain()"]


_CURRENT_FOLDER_LAST = """import sys
if not getattr(sys.flags, "safe_path", False):
    sys.path.append(sys.path.pop(0))
"""


# Huge pages; in bytes, what is asked for by itself and when the rest is given back: never. And one
# heap for all threads: a thread's own goes back to the kernel when it is empty, whatever was said.
_MALLOC = ("hugetlb=1", f"mmap_threshold={2**32}", f"trim_threshold={2**34}", "arena_max=1")


def common_env(task: TaskConfig) -> dict[str, str]:
    """What every worker's process should begin with, unless a person set it."""
    env = {"OMP_NUM_THREADS": str(task.threads)}
    if task.device == "cpu":
        # Or the C library asks the kernel for each large tensor's memory, page by page, and gives
        # it back, step after step, which can be felt (docs/measured.md).
        env["GLIBC_TUNABLES"] = ":".join(f"glibc.malloc.{setting}" for setting in _MALLOC)
    return env


def tell(run_dir: Path, failure: Failure) -> None:
    """Say to a person why a run did not end well."""
    if failure.traceback:
        print(failure.traceback.rstrip(), file=sys.stderr)
    print(f"accbench: {failure.error}; logs in {run_dir / 'logs'}", file=sys.stderr)


def conclude(run_dir: Path, failure: Failure | None) -> int:
    """Tell the person and the record how a run ended; returns the exit status."""
    if failure is None:
        return 0
    tell(run_dir, failure)
    path = run_dir / config.RECORDS_FILE
    # One that was asked to stop, and has saved, says so itself.
    if failure.is_recorded or (failure.status == "interrupted" and records.is_interrupted(path)):
        return failure.exit_status
    try:
        records.append_failure(path, failure.status, failure.error)
    except RequestError as error:
        print(f"accbench: the record lacks its end: {error}", file=sys.stderr)
    return failure.exit_status
