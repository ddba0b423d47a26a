"""Stop signals such as SIGTERM and Ctrl-C.

The first signal asks for a graceful stop, to save and end; a further one forces an end at once.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

# systemd, `timeout` and Slurm signal a process both directly and through its parent: signals closer
# together than this are one request.
SAME_SIGNAL_S = 1.0
# The kernel may deliver the first of two signals to another thread, and Python handles it only when
# that thread runs; this is how long to wait for that.
_DELIVERY_S = 0.3
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def die_with_parent(parent: int | None) -> None:
    """Have the kernel kill this process when its parent is killed; Linux alone can.

    The setting belongs to the calling thread, which may reset it, and ends with that thread.

    Args:
        parent: its process id where it is known; if it has already ended, this process ends too.
    """
    _set_parent_death_signal(signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)  # the parent was killed before the setting applied


def outlive_parent() -> None:
    """Reset `die_with_parent`."""
    _set_parent_death_signal(0)


@contextlib.contextmanager
def signal_wakeup_fd() -> Iterator[int]:
    """Yield a file descriptor that gets each handled signal's number as a byte, at once.

    Python's own handlers wait until the main thread returns from C code. When the block ends, the
    descriptor reaches its end of file, and its reader closes it.
    """
    global _at_fork_is_set
    if not _at_fork_is_set:
        # A signal to a DataLoader's process must not wake this one.
        os.register_at_fork(after_in_child=_reset_wakeup_fd)
        _at_fork_is_set = True
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(before)
        os.close(writing)


_at_fork_is_set = False


def _reset_wakeup_fd() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


def _set_parent_death_signal(number: int) -> None:
    if sys.platform == "linux":
        option = 1  # PR_SET_PDEATHSIG, prctl(2)
        ctypes.CDLL(None).prctl(option, number)


class StopSignals:
    """A recorder of the stop signals that come while its block runs; its owner acts on them.

    Signals that the process ignores, such as a hangup under `nohup`, stay ignored. A hangup after a
    first signal forces nothing, nor does a Ctrl-C after that: the terminal or the notebook's cell
    that the first signal came from has gone. Outside the main thread, where Python delivers no
    signals, it records none.
    """

    def __init__(self) -> None:
        self.graceful: signal.Signals | None = None
        self.forced: signal.Signals | None = None
        self._graceful_at = 0.0
        self._has_hung_up = False

    def __enter__(self) -> "StopSignals":
        self._before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        self.take()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def take(self) -> None:
        """Install the handlers, whatever has replaced them since the block began."""
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                ignored = handler is signal.SIG_IGN
                signal.signal(number, signal.SIG_IGN if ignored else self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        passed_s = time.monotonic() - self._graceful_at
        if number == signal.SIGHUP and self.graceful is not None:
            self._has_hung_up = True
            return
        if number == signal.SIGINT and self.graceful is not None:
            if not self._has_hung_up:
                time.sleep(_DELIVERY_S)  # a hangup's own handler runs in here
            if self._has_hung_up:
                return
        if number == signal.SIGQUIT or (self.graceful is not None and passed_s > SAME_SIGNAL_S):
            self.forced = self.forced or signal.Signals(number)
            self.on_forced()
        elif self.graceful is None:
            self.graceful, self._graceful_at = signal.Signals(number), time.monotonic()

    def on_forced(self) -> None:
        """Handle a forced stop; called from the signal handler. Subclasses override it."""
