"""SIGTERM and Ctrl-C as a request to stop after the step, which all ranks then do together."""

import os
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from accbench.errors import StoppedError
from accbench.recording import terminal
from accbench.stop_signals import StopSignals


class StopRequests:
    """Catches the signals while its block runs; `agreed` tells when to stop.

    Args:
        timeout_s: seconds to wait for another rank.
        log: where gloo's greeting goes, which is no news for a terminal.

    An order ends the process at once.
    """

    def __init__(self, timeout_s: float, log: Path) -> None:
        self.timeout_s, self.log = timeout_s, log
        self.signals = _EndsAtOnce()
        self._pending: tuple[torch.Tensor, dist.Work] | None = None
        self._group: dist.ProcessGroup | None = None

    def __enter__(self) -> "StopRequests":
        if dist.is_initialized():
            # Of its own, so that no collective of training comes in between.
            timeout = timedelta(seconds=self.timeout_s)
            with terminal.descriptors_to(self.log):
                self._group = dist.new_group(backend="gloo", timeout=timeout)
        self.signals.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        self.signals.__exit__()
        # After an error the other ranks may be gone, and waiting for them would hide it.
        if self._pending is not None and (error is None or isinstance(error, StoppedError)):
            self._pending[1].wait()
        self._pending = None

    @property
    def received(self) -> bool:
        """Whether this very rank was asked to stop."""
        return self.signals.wish is not None

    def agreed(self) -> bool:
        """Whether all ranks stop now. Asked once after each step, by all of them.

        A request is passed on in the background of the next step, so that no step waits for
        another rank's answer: all stop one step after the first of them was asked to.
        """
        if self._group is None:
            return self.received
        stop = False
        if self._pending is not None:
            asked, work = self._pending
            work.wait()
            stop = bool(asked.item())
        asked = torch.tensor([float(self.received)])
        work = dist.all_reduce(asked, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = asked, work
        return stop


class _EndsAtOnce(StopSignals):
    def ordered(self) -> None:
        assert self.order is not None
        os._exit(128 + self.order)
