"""Standard output and error whose encoding lacks characters, or that are closed early."""

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


def escape_unencodable() -> None:
    """Escape characters that a stream's encoding lacks; a folder's name may contain some."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def silence_fake_tensor_log() -> Iterator[None]:
    """Silence torch's log of exceptions in fake tensors for the block.

    The caller reports the exception that torch raises while it traces a model; the log would repeat
    it.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_disabled


def discard_output() -> None:
    """Discard all further standard output, as its reader has gone."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def quiet_when_closed(command: Callable[P, int]) -> Callable[P, int]:
    """Wrap a command so that it ends quietly, as `ls` does, when its reader has gone.

    For instance in `accbench ... | head`.
    """

    @functools.wraps(command)
    def quiet(*args: P.args, **kwargs: P.kwargs) -> int:
        escape_unencodable()
        try:
            try:
                return command(*args, **kwargs)
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()  # here, or Python complains when it ends
        except BrokenPipeError:
            if not _reader_has_gone():  # another pipe has broken
                raise
            discard_output()
            return 128 + signal.SIGPIPE

    return quiet


def _reader_has_gone() -> bool:
    poll = select.poll()
    poll.register(1, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
