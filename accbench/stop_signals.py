"""SIGTERM and Ctrl-C: the first is a wish to save and end, one more is an order to end at once."""

import ctypes
import os
import signal
import sys
import threading
import time
from types import FrameType

# systemd, `timeout` and Slurm reach a process directly and through its parent: signals
# closer together than this are one wish.
SAME_WISH_S = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def die_with_parent(parent: int | None) -> None:
    """Have the kernel end this process if its parent is killed; Linux alone can.

    Args:
        parent: its process id where it is known; one that is gone already ends this process too.
    """
    _set_parent_death_signal(signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)  # it was killed before that was asked


def outlive_parent() -> None:
    """Take `die_with_parent` back."""
    _set_parent_death_signal(0)


def _set_parent_death_signal(number: int) -> None:
    if sys.platform == "linux":
        option = 1  # PR_SET_PDEATHSIG, prctl(2)
        ctypes.CDLL(None).prctl(option, number)


class StopSignals:
    """Notes the signals that come while its block runs; what to do is its owner's to ask.

    A signal that the process ignores, as `nohup` has it ignore a hangup, stays ignored. A hangup
    after a wish is no order: what the wish came from, a terminal or a notebook's cell, has gone.
    Outside the main thread, where Python gives no signals, it notes none.
    """

    def __init__(self) -> None:
        self.wish: signal.Signals | None = None
        self.order: signal.Signals | None = None
        self._wished_at = 0.0

    def __enter__(self) -> "StopSignals":
        self._before = {number: signal.getsignal(number) for number in _SIGNALS}
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
        if number == signal.SIGHUP and self.wish is not None:
            return
        passed_s = time.monotonic() - self._wished_at
        if number == signal.SIGQUIT or (self.wish is not None and passed_s > SAME_WISH_S):
            self.order = self.order or signal.Signals(number)
            self.ordered()
        elif self.wish is None:
            self.wish, self._wished_at = signal.Signals(number), time.monotonic()
            self.wished()

    def wished(self) -> None:
        """Called at the wish, from the handler."""

    def ordered(self) -> None:
        """Called at an order, from the handler."""
