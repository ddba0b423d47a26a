"""Standard output and error as a command may find them: of few characters, or closed early."""

import contextlib
import functools
import io
import logging
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from typing import ParamSpec

P = ParamSpec("P")


def take_any_text() -> None:
    """Write what the stream's encoding lacks as an escape; a folder's name may have it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def without_fake_tensors_log() -> Iterator[None]:
    """What torch raises as it traces a model is told once, by whoever gets it, and not twice."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_disabled


def drop_output() -> None:
    """Let what is still written to standard output vanish, as nobody reads it any more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def quiet_when_closed(command: Callable[P, int]) -> Callable[P, int]:
    """The command, which ends as `ls` does where its reader has left: `accbench ... | head`."""

    @functools.wraps(command)
    def quiet(*args: P.args, **kwargs: P.kwargs) -> int:
        take_any_text()
        try:
            try:
                return command(*args, **kwargs)
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()  # here, or Python complains when it ends
        except BrokenPipeError:
            if not _reader_has_left():  # another pipe than the one to the reader
                raise
            drop_output()
            return 128 + signal.SIGPIPE

    return quiet


def _reader_has_left() -> bool:
    poll = select.poll()
    poll.register(1, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
