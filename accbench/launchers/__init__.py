"""The launcher contract: a launcher starts the workers and waits for their end.

`accbench/launchers/<name>.py` defines `class Launcher` with `launch`. The
helpers here are what every launcher tells a person and the record.
"""

import abc
import dataclasses
import sys
from pathlib import Path

import accbench
from accbench import config
from accbench.config import TaskConfig, plugins
from accbench.distributed import mesh
from accbench.errors import RequestError
from accbench.recording import records
from accbench.system import malloc


@dataclasses.dataclass(frozen=True)
class Failure:
    """The reason why a run failed or stopped."""

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
        """Whether a restart from the newest checkpoint may succeed."""
        return self.exit_status == 1 and self.status == "error"


WORKER = ("-m", "accbench.training.worker_process")
"""Arguments to the Python interpreter that start a worker."""


class Launcher(abc.ABC):
    """A starter of one worker per device, with the environment that the engine asks for."""

    restarts_workers = False
    """Whether `--max_restarts` is this launcher's own to keep."""
    elsewhere = False
    """Whether workers are no processes of this one's, and perhaps on other machines."""
    starts_later = False
    """Whether a job is submitted that itself finds the checkpoint of `--resume auto`, later."""
    attached = False
    """Whether `launch` is to return when the run has ended, and no sooner."""

    def script(self, task: TaskConfig, worker: list[str]) -> str:
        """Return what would be submitted, for `--dry_run` to print.

        Raises:
            RequestError: this launcher submits nothing.
        """
        raise RequestError(
            f"--dry_run is not for --launcher {task.launcher}, which submits nothing"
        )

    def resolve(self, task: TaskConfig) -> TaskConfig:
        """Resolve a task on the machine that trains, by `resolving.resolve` there.

        Raises:
            RequestError: the task cannot run there; the message says why and what to do.
        """
        from accbench import resolving

        return resolving.resolve(task)

    @classmethod
    def problem(cls, task: TaskConfig) -> str | None:
        """Return what is wrong with this launcher's flags and the remedy; None if nothing is."""
        return None

    def joined(self, task: TaskConfig) -> "Joined | None":
        """Return a run of another process to take part in; None to begin one.

        Raises:
            NoMoreRunsError: there is none any more, of several one after the other.
            RequestError: it cannot be joined.
        """
        return None

    def follows(self, task: TaskConfig) -> bool:
        """Return whether this process only takes part in runs that another process begins."""
        return False

    def farewell(self, task: TaskConfig) -> None:
        """Tell the processes that take part that no more runs follow."""
        return

    @abc.abstractmethod
    def launch(self, task: TaskConfig, worker: list[str]) -> Failure | None:
        """Run the workers until all have ended; no process is left when this returns.

        Args:
            task: resolved, its folder made.
            worker: arguments to the Python interpreter that start a worker.

        Raises:
            RequestError: nothing could be started.
        """


@dataclasses.dataclass(frozen=True)
class Joined:
    """A run whose folder and record another process keeps."""

    task: TaskConfig
    worker: list[str]
    """Arguments to the Python interpreter that start a worker."""


def resolve(task: TaskConfig) -> TaskConfig:
    """Resolve a task on the machine that trains, by the task's launcher.

    Raises:
        RequestError: the task cannot run there, or there is no such launcher.
    """
    launcher: Launcher = plugins.load("launchers", task.launcher)()
    resolved = launcher.resolve(task)
    world_size = mesh.num_workers(resolved)
    if world_size is not None:  # else each worker looks at its own
        plugins.load("engines", resolved.engine).mesh_of(resolved, world_size)
    return resolved


def anywhere(worker: list[str]) -> list[str]:
    """Return the arguments that start a worker on another machine, where main.py is elsewhere."""
    return worker if worker[0] == "-m" else list(WORKER)


def what_runs() -> dict[str, str]:
    """Return the versions that must be the same on all machines of a run."""
    import torch

    return {"accbench": accbench.__version__, "torch": torch.__version__}


def main_of(module: str) -> list[str]:
    """Return interpreter arguments that call `main` of a module of accbench.

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
    """Return the environment variables of every worker; those that the user set win.

    The heap stays as it is where ACCBENCH_MALLOC is `system`.
    """
    env = {"OMP_NUM_THREADS": str(task.threads)}
    if task.device == "cpu" and not malloc.is_left_alone():
        # Or the C library asks the kernel for each large tensor's memory, page by page, and gives
        # it back, step after step, which can be felt (docs/measured.md).
        env["GLIBC_TUNABLES"] = ":".join(f"glibc.malloc.{setting}" for setting in _MALLOC)
    return env


def tell(run_dir: Path, failure: Failure) -> None:
    """Print why a run failed or stopped."""
    if failure.traceback:
        print(failure.traceback.rstrip(), file=sys.stderr)
    print(f"accbench: {failure.error}; logs in {run_dir / 'logs'}", file=sys.stderr)


def conclude(run_dir: Path, failure: Failure | None) -> int:
    """Print and record how a run ended, and return the exit status."""
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
