"""SIGTERM and Ctrl-C: the first is a wish to save and end, one more is an order to end at once."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

# systemd, `timeout` and Slurm reach a process directly and through its parent: signals
# closer together than this are one wish.
SAME_WISH_S = 1.0
# Of signals sent one after the other the kernel may give the first to another thread, which then
# has to be run before this process knows of it.
_ON_ITS_WAY_S = 0.3
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def die_with_parent(parent: int | None) -> None:
    """Have the kernel end this process if its parent is killed; Linux alone can.

    It is the calling thread that asks, and takes it back or ends with it.

    Args:
        parent: its process id where it is known; one that is gone already ends this process too.
    """
    _set_parent_death_signal(signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)  # it was killed before that was asked


def outlive_parent() -> None:
    """Take `die_with_parent` back."""
    _set_parent_death_signal(0)


@contextlib.contextmanager
def wakes() -> Iterator[int]:
    """A file descriptor that every handled signal puts a byte into, its number, at once.

    Python's own handlers wait until the main thread has returned from what it computes in C. At
    the block's end it is read to its end, and the reader closes it.
    """
    global _at_fork_is_set
    if not _at_fork_is_set:
        # What a DataLoader's process is sent is none of this one's business.
        os.register_at_fork(after_in_child=_forget_wakes)
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


def _forget_wakes() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


def _set_parent_death_signal(number: int) -> None:
    if sys.platform == "linux":
        option = 1  # PR_SET_PDEATHSIG, prctl(2)
        ctypes.CDLL(None).prctl(option, number)


class StopSignals:
    """Notes the signals that come while its block runs; what to do is its owner's to ask.

    A signal that the process ignores, as `nohup` has it ignore a hangup, stays ignored. A hangup
    after a wish is no order, nor is a Ctrl-C after that: what the wish came from, a terminal or a
    notebook's cell, has gone.
    Outside the main thread, where Python gives no signals, it notes none.
    """

    def __init__(self) -> None:
        self.wish: signal.Signals | None = None
        self.order: signal.Signals | None = None
        self._wished_at = 0.0
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
        """Handle the signals, whatever has taken them since the block began."""
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                ignored = handler is signal.SIG_IGN
                signal.signal(number, signal.SIG_IGN if ignored else self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        passed_s = time.monotonic() - self._wished_at
        if number == signal.SIGHUP and self.wish is not None:
            self._has_hung_up = True
            return
        if number == signal.SIGINT and self.wish is not None:
            if not self._has_hung_up:
                time.sleep(_ON_ITS_WAY_S)  # a hangup's own handler runs in here
            if self._has_hung_up:
                return
        if number == signal.SIGQUIT or (self.wish is not None and passed_s > SAME_WISH_S):
            self.order = self.order or signal.Signals(number)
            self.ordered()
        elif self.wish is None:
            self.wish, self._wished_at = signal.Signals(number), time.monotonic()

    def ordered(self) -> None:
        """Called at an order, from the handler."""
