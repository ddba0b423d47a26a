"""One run of a comparison, by a launcher in a process of its own.

The launcher's process is forked from a server that has imported torch, because that import takes
seconds and a comparison starts dozens of launchers. Workers are still fresh processes, which the
launcher starts as in any run.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import FrameType
from typing import Literal

from accbench import config
from accbench.recording import records
from accbench.recording.device_watch import DeviceWatch
from accbench.system import standard_streams
from accbench.system.turns import SOCKET_VARIABLE

JobKind = Literal["run", "reference", "floor", "check", "free_draws", "copy"]
# Seconds that a launcher has to end its workers when the comparison is stopped.
_GRACE_S = 15
# Keeps Python (3.11 and later) from looking for modules in the current folder first, where a user's
# file would hide a module of the same name that multiprocessing imports.
_SAFE_PATH, _SET_HERE = "PYTHONSAFEPATH", "for the fork server"
_PRELOADED = ["accbench.comparing.fork_server_preload"]


class StopRequest:
    """SIGTERM and Ctrl-C as KeyboardInterrupt, while its block runs and but for parts of it."""

    def __init__(self) -> None:
        self._is_asked = self._is_held_back = False

    def __enter__(self) -> "StopRequest":
        self._before = {n: signal.signal(n, self._note) for n in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._is_asked = True
        if not self._is_held_back:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Raise what comes in the block at its end."""
        self._is_held_back = True
        try:
            yield
        except (EOFError, OSError):  # the signal may have reached others that the block needs
            if not self._is_asked:
                raise
        finally:
            self._is_held_back = False
        if self._is_asked:
            raise KeyboardInterrupt


class JobProcess:
    """A process with the launcher of one job.

    Args:
        kind: train, or a part of the numerics pass.
        argument: of the numerics pass, see `accbench.comparing.numerics`.
        flags: the flags of a run.
        folder: the run's folder; its records get the load of other programs and the devices' state.
        log: file for the launcher's output.
        num_devices: number of accelerators to watch besides this machine; None watches nothing.
        turns: the socket at which the run's workers get turns; None: they do not wait for any.
    """

    def __init__(
        self,
        kind: JobKind,
        argument: str,
        flags: Sequence[str],
        folder: Path,
        log: Path,
        num_devices: int | None,
        turns: Path | None = None,
    ) -> None:
        start_fork_server()
        self._process = multiprocessing.get_context("forkserver").Process(
            target=_launch, args=(kind, argument, list(flags), folder, log, num_devices, turns)
        )

    def start(self, stop: StopRequest) -> None:
        """Start it; a request to stop is not raised meanwhile.

        The fork server would print a traceback for an incomplete request.
        """
        with stop.held_back():
            self._process.start()

    @property
    def pid(self) -> int | None:
        """Return the launcher's process id; None before it starts."""
        return self._process.pid

    @property
    def sentinel(self) -> int:
        """Return what `multiprocessing.connection.wait` takes, ready once the process has ended."""
        return self._process.sentinel

    def join(self) -> int | None:
        """Wait for its end, and return the launcher's exit status."""
        self._process.join()
        return self._process.exitcode

    def end(self) -> None:
        """Have the launcher end its workers and itself, or kill it after a while."""
        if self._process.pid is not None:
            self._process.terminate()
            self._process.join(_GRACE_S)
            self._process.kill()
            self._process.join()


@contextlib.contextmanager
def ended_on_interrupt(processes: Sequence[JobProcess]) -> Iterator[StopRequest]:
    """End the processes that have started if a request to stop, or an error, ends the block."""
    with StopRequest() as stop:
        try:
            yield stop
        except BaseException:
            for process in processes:
                process.end()
            raise


def start_fork_server() -> None:
    """Start the process that forks launchers, unless it is there; does not wait for its imports."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    # Ctrl-C in a terminal reaches every process there; the fork server and all that it forks leave
    # it to the comparison. It is blocked here, so that one that comes now is handled afterwards.
    resource_tracker.ensure_running()  # otherwise the fork server starts it, which unblocks Ctrl-C
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    is_ours = _SAFE_PATH not in os.environ and Path(__file__).parents[2] != Path.cwd()
    if is_ours:
        os.environ[_SAFE_PATH] = _SET_HERE
    try:
        forkserver.ensure_running()
    finally:
        if is_ours:
            del os.environ[_SAFE_PATH]
        signal.signal(signal.SIGINT, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)


def _launch(
    kind: JobKind, argument: str, flags: list[str], folder: Path, log: Path,
    num_devices: int | None, turns: Path | None,
) -> None:  # fmt: skip
    # These import torch, which the comparison itself does not need.
    from accbench.comparing import numerics
    from accbench.launchers.common import run

    if os.environ.get(_SAFE_PATH) == _SET_HERE:
        del os.environ[_SAFE_PATH]  # workers find modules as they do in a run
    if turns is not None:
        os.environ[SOCKET_VARIABLE] = str(turns)
    threading.Thread(target=_die_with_comparison, daemon=True).start()
    with log.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    standard_streams.escape_unencodable()
    watch = None if num_devices is None else DeviceWatch(num_devices)
    flags = [*flags, f"--output_dir={folder}"]
    status = (
        run.run(flags, "accbench run", attached=True)
        if kind == "run"
        else numerics.main([kind, argument, *flags])
    )
    sys.stdout.flush()
    folder.mkdir(exist_ok=True)
    if watch is not None:
        records.append(folder / config.RECORDS_FILE, watch.stop())
    sys.exit(status)


def _die_with_comparison() -> None:
    # To the kernel the parent is the fork server, which lives as long as this process. To
    # multiprocessing it is the comparison, whose end it sees through a pipe.
    comparison = multiprocessing.parent_process()
    assert comparison is not None
    comparison.join()
    os.kill(os.getpid(), signal.SIGKILL)  # and the workers die with this process
