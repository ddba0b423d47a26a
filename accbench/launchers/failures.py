"""What is left of workers that ended: who failed first, and the processes behind them."""

import contextlib
import json
import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from accbench.errors import REFUSED_VIEWS, STOPPED_STATUS, end_status
from accbench.launchers import Failure

# Taken on the disk before the workers start, for what a worker says when it is full.
_ERROR_BYTES = 16384


def reserve(paths: Iterable[Path]) -> Failure | None:
    """Make the files that workers write their errors over; what is wrong if they cannot be."""
    for path in paths:
        try:
            path.write_bytes(b" " * _ERROR_BYTES)
        except OSError as error:
            why = f"cannot write to {path.parent}: {error.strerror}; set TMPDIR elsewhere"
            return Failure("error", why, exit_status=2)
    return None


def send(number: signal.Signals, pids: Iterable[int]) -> None:
    """Signal those that still run."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end_groups(pids: Iterable[int]) -> None:
    """Kill what workers left behind: each leads a process group that holds its loaders too."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


# What torch says -> what a person can do about it here.
_HINTS = {
    **dict.fromkeys(
        REFUSED_VIEWS,
        " (engines ddp and inductor have images in channels_last; --ddp.no-channels_last or "
        "--inductor.no-channels_last, or x.flatten(1) in the place of x.view)",
    ),
    "killed by signal: Bus error": " (that is /dev/shm: --workers 0, or docker --shm-size 8g)",
}


def first_failure(exit_codes: Mapping[int, int], error_files: Mapping[int, Path]) -> Failure:
    """The failure that caused the others, of the ranks that did not end well.

    A rank that was killed comes before one that raised: what a rank raises because
    another is gone may be written down first. Of those that raised, the earliest; one
    that raised and then crashed while it ended is one that raised.
    """
    raised = {rank: read_error(path) for rank, path in error_files.items()}
    for rank, exit_code in exit_codes.items():
        killed = exit_code < 0 and exit_code != -signal.SIGTERM
        if killed and raised[rank] is None:
            name = signal.Signals(-exit_code).name
            hint = " (is the machine out of memory?)" if name == "SIGKILL" else ""
            return Failure("error", f"rank {rank} was killed by {name}{hint}")
    known = {rank: error for rank, error in raised.items() if error is not None}
    if not known:
        rank, exit_code = next(iter(exit_codes.items()))
        return Failure("error", f"rank {rank} exited with status {exit_code}, see above")
    error = min(known.values(), key=lambda error: error["unix_time"])
    rank = error["rank"]
    if error["name"] == "RequestError":
        return Failure("error", error["message"], exit_status=2)
    if error["name"] == "StoppedError":
        return Failure("interrupted", error["message"], exit_status=STOPPED_STATUS)
    line = f"rank {rank} failed: {error['name']}: {' '.join(error['message'].split())}"
    line += next((hint for words, hint in _HINTS.items() if words in line), "")
    status = end_status(error["name"], error["message"])
    return Failure(status, line, f"rank {rank}: {error['traceback']}", at=error["unix_time"])


def read_error(path: Path) -> Any | None:
    """What a worker wrote over its file; None if it wrote nothing."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
