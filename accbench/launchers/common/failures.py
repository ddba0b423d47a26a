"""Workers that ended: which failed first, and the processes they left behind."""

import contextlib
import json
import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from accbench.errors import REFUSED_VIEWS, STOPPED_STATUS, end_status
from accbench.launchers import Failure

# Reserved on disk before the workers start, so that a worker can report a full disk.
_ERROR_BYTES = 16384


def reserve(paths: Iterable[Path]) -> Failure | None:
    """Create the files that workers overwrite with their errors; return why if that fails."""
    for path in paths:
        try:
            path.write_bytes(b" " * _ERROR_BYTES)
        except OSError as error:
            why = f"cannot write to {path.parent}: {error.strerror}; set TMPDIR to another folder"
            return Failure("error", why, exit_status=2)
    return None


def send(number: signal.Signals, pids: Iterable[int]) -> None:
    """Send a signal to those processes that still run."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end_groups(pids: Iterable[int]) -> None:
    """Kill the workers' process groups, which also hold their data loaders."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


# torch's message -> what the user can do about it.
_HINTS = {
    **dict.fromkeys(
        REFUSED_VIEWS,
        " (engines ddp and inductor have images in channels_last; use --ddp.no-channels_last or "
        "--inductor.no-channels_last, or x.flatten(1) instead of x.view)",
    ),
    "killed by signal: Bus error": " (that is /dev/shm: --workers 0, or docker --shm-size 8g)",
}


def keep_first_exit_codes(context: Any) -> dict[int, int]:
    """Have torch elastic keep the exit codes of workers that ended before it ends the others.

    Its own result has the codes of those that it killed as well (torch 2.15).

    Args:
        context: elastic's `PContext` of subprocesses, whose `close` this replaces.

    Returns:
        local rank -> exit code other than 0; empty until the context closes.
    """
    codes: dict[int, int] = {}
    close = context.close

    def close_and_keep(*arguments: Any, **options: Any) -> None:
        if not codes:
            polled = {r: h.proc.poll() for r, h in context.subprocess_handlers.items()}
            codes.update({rank: code for rank, code in polled.items() if code})
        close(*arguments, **options)

    context.close = close_and_keep
    return codes


def first_failure(exit_codes: Mapping[int, int], error_files: Mapping[int, Path]) -> Failure:
    """Return the failure that caused those of the other ranks.

    A killed rank comes before one that raised, because another rank's error about the lost one may
    be written first. Among ranks that raised, the earliest error counts; a rank that raised and
    then crashed while it ended counts as one that raised.
    """
    raised = {rank: read_error(path) for rank, path in error_files.items()}
    for rank, exit_code in exit_codes.items():
        killed = exit_code < 0 and exit_code != -signal.SIGTERM
        if killed and raised[rank] is None:
            name = signal.Signals(-exit_code).name
            hint = " (is the machine out of memory?)" if name == "SIGKILL" else ""
            return Failure("error", f"rank {rank} was killed by {name}{hint}")
    errors = {rank: error for rank, error in raised.items() if error is not None}
    if not errors:
        rank, exit_code = next(iter(exit_codes.items()))
        return Failure("error", f"rank {rank} exited with status {exit_code}, see above")
    error = min(errors.values(), key=lambda error: error["unix_time"])
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
    """Read the error that a worker wrote over its file; None if it wrote none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
