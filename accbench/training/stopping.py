"""SIGTERM and Ctrl-C as a request to stop after the step, which all ranks then do together."""

import os
import signal
import threading
from datetime import timedelta
from types import FrameType, TracebackType

import torch
import torch.distributed as dist

from accbench.errors import StoppedError

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequests:
    """Catches the signals while its block runs; `agreed` tells when to stop.

    Args:
        timeout_s: seconds to wait for another rank.

    The second signal ends the process at once. Does nothing outside the main thread, where
    Python gives no signals.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.received: str | None = None
        self._pending: tuple[torch.Tensor, dist.Work] | None = None
        self._group: dist.ProcessGroup | None = None

    def __enter__(self) -> "StopRequests":
        if dist.is_initialized():
            # Of its own, so that no collective of training comes in between.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_s))
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._catch) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        for number, handler in self._before.items():
            signal.signal(number, handler)
        # After an error the other ranks may be gone, and waiting for them would hide it.
        if self._pending is not None and (error is None or isinstance(error, StoppedError)):
            self._pending[1].wait()
        self._pending = None

    def _catch(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = signal.Signals(number).name

    def agreed(self) -> bool:
        """Whether all ranks stop now. Asked once after each step, by all of them.

        A request is passed on in the background of the next step, so that no step waits for
        another rank's answer: all stop one step after the first of them was asked to.
        """
        if self._group is None:
            return self.received is not None
        stop = False
        if self._pending is not None:
            asked, work = self._pending
            work.wait()
            stop = bool(asked.item())
        asked = torch.tensor([float(self.received is not None)])
        work = dist.all_reduce(asked, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = asked, work
        return stop
