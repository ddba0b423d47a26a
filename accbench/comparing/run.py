"""One run of a comparison, by a launcher in a process of its own.

The launcher's process is forked from a server that has imported torch, because that import takes
seconds and a comparison starts dozens of launchers. Workers are still fresh processes, which the
launcher starts as in any run.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import FrameType
from typing import Literal

from accbench import config
from accbench.recording import records
from accbench.recording.device_watch import DeviceWatch
from accbench.system import standard_streams

JobKind = Literal["run", "reference", "floor", "check", "free_draws", "copy"]
# Seconds that a launcher has to end its workers when the comparison is stopped.
_GRACE_S = 15
# Keeps Python (3.11 and later) from looking for modules in the current folder first, where a user's
# file would hide a module of the same name that multiprocessing imports.
_SAFE_PATH, _SET_HERE = "PYTHONSAFEPATH", "for the fork server"
_PRELOADED = ["accbench.comparing.fork_server_preload"]


def run_to_its_end(
    kind: JobKind,
    argument: str,
    flags: Sequence[str],
    folder: Path,
    log: Path,
    num_devices: int | None,
) -> int | None:
    """Run one job and return the launcher's exit status; SIGTERM and Ctrl-C end the run first.

    Args:
        kind: train, or a part of the numerics pass.
        argument: of the numerics pass, see `accbench.comparing.numerics`.
        flags: the flags of a run.
        folder: the run's folder; its records get the load of other programs and the devices' state.
        log: file for the launcher's output.
        num_devices: number of accelerators to watch besides this machine; None watches nothing.
    """
    stopped = started = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        if started:
            raise KeyboardInterrupt

    _start_fork_server()
    context = multiprocessing.get_context("forkserver")
    process = context.Process(
        target=_launch, args=(kind, argument, list(flags), folder, log, num_devices)
    )
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        # Not interrupted: the fork server would print a traceback for an incomplete request.
        try:
            process.start()
        except (EOFError, OSError):  # a SIGTERM to the whole group has ended the fork server
            if not stopped:
                raise
        started = True
        if stopped:
            raise KeyboardInterrupt
        process.join()
    except KeyboardInterrupt:
        if process.pid is not None:
            process.terminate()
            process.join(_GRACE_S)
            process.kill()
            process.join()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return process.exitcode


def _start_fork_server() -> None:
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
    kind: JobKind, argument: str, flags: list[str], folder: Path, log: Path, num_devices: int | None
) -> None:
    # These import torch, which the comparison itself does not need.
    from accbench.comparing import numerics
    from accbench.launchers.common import run

    if os.environ.get(_SAFE_PATH) == _SET_HERE:
        del os.environ[_SAFE_PATH]  # workers find modules as they do in a run
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
