"""SIGTERM and Ctrl-C as a request to stop after the step, which all ranks then do together."""

import contextlib
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from accbench.errors import LAUNCHER_PID_VARIABLE, RequestError, StoppedError
from accbench.recording import terminal
from accbench.system import folders
from accbench.system.stop_signals import (
    STOP_SIGNALS,
    StopSignals,
    die_with_parent,
    outlive_parent,
    signal_wakeup_fd,
)

_POLL_S = 0.05
# A launcher of accbench's and torchrun's agent set one of these.
_LAUNCHED = (LAUNCHER_PID_VARIABLE, "TORCHELASTIC_RUN_ID")


class StopRequests:
    """Catches stop signals while its block runs; `agreed` tells when to stop.

    Args:
        timeout_s: seconds to wait for another rank.
        run_dir: the run's folder.
        rank: this process's rank.

    A second signal ends the process at once. A worker that was asked to stop does so even if its
    launcher is killed: a notebook's interrupt and Python's `subprocess.run` give a launcher half
    a second, and then SIGKILL.
    """

    def __init__(self, timeout_s: float, run_dir: Path, rank: int) -> None:
        self.timeout_s, self.run_dir, self.rank = timeout_s, run_dir, rank
        self.log = terminal.log_file(run_dir, rank)
        self.signals = _EndsAtOnce()
        self._stack = contextlib.ExitStack()
        self._has_ended = threading.Event()
        self._pending: tuple[torch.Tensor, dist.Work] | None = None
        self._group: dist.ProcessGroup | None = None

    def __enter__(self) -> "StopRequests":
        if dist.is_initialized():
            # A group of its own, so that no collective of training comes in between.
            timeout = timedelta(seconds=self.timeout_s)
            with terminal.redirect_descriptors(self.log):
                group: Any = dist.new_group(backend="gloo", timeout=timeout)
                self._group = group
        self.signals.__enter__()
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and any(name in os.environ for name in _LAUNCHED):
            # A process that a shell started outlives it anyway, and has no launcher to replace.
            self._outlive_launcher_after_signal()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        self.signals.__exit__()
        if not self.received:
            self._stack.close()
        # After an error the other ranks may be gone, and waiting for them would hide it.
        if self._pending is not None and (error is None or isinstance(error, StoppedError)):
            self._pending[1].wait()
        # Or the group's threads would outlive it (see process_group.close).
        self._pending = self._group = None

    def _outlive_launcher_after_signal(self) -> None:
        """Outlive the launcher once a stop is requested, by a thread that watches for it.

        This thread may be in C code for the length of a step.
        """
        launcher, watches = os.getppid(), threading.Event()
        woken = self._stack.enter_context(signal_wakeup_fd())

        def watch() -> None:
            die_with_parent(launcher)
            watches.set()
            while (number := os.read(woken, 1)) and number[0] not in STOP_SIGNALS:
                pass
            if not number:  # the block has ended
                os.close(woken)
                return
            outlive_parent()
            self._finish_alone(launcher)

        threading.Thread(target=watch, daemon=True).start()
        watches.wait()
        outlive_parent()  # for this thread; from now on the other one dies with the parent
        self._stack.callback(die_with_parent, launcher)
        self._stack.callback(self._has_ended.set)

    def _finish_alone(self, launcher: int) -> None:
        """Do the launcher's work from the moment that it is gone, once a stop is requested."""
        while os.getppid() == launcher:
            if self._has_ended.wait(_POLL_S):
                return
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # the terminal has gone with it
                stack.enter_context(terminal.redirect_descriptors(self.log))
            if self.rank == 0:
                with contextlib.suppress(OSError, RequestError):  # it may be this process's own
                    stack.enter_context(folders.lock(self.run_dir))
            time.sleep(self.timeout_s)
            os.kill(os.getpid(), signal.SIGKILL)  # nobody else would end it

    @property
    def received(self) -> bool:
        """Whether this rank was asked to stop."""
        return self.signals.graceful is not None

    def agreed(self) -> bool:
        """Return whether all ranks stop now; all of them call this once after each step.

        Ranks exchange requests in the background of the next step, so that no step waits for
        another rank: all stop one step after the first of them was asked to.
        """
        if self._group is None:
            return self.received
        stop = False
        if self._pending is not None:
            stop_flag, work = self._pending
            work.wait()
            stop = bool(stop_flag.item())
        stop_flag = torch.tensor([float(self.received)])
        work = dist.all_reduce(stop_flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = stop_flag, work
        return stop


class _EndsAtOnce(StopSignals):
    def on_forced(self) -> None:
        assert self.forced is not None
        os._exit(128 + self.forced)
