"""The report of a worker's failure: once, where it belongs, with an exit status."""

import contextlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

from accbench import config
from accbench.distributed.process_group import Topology
from accbench.errors import (
    ERROR_FILE_VARIABLE,
    LAUNCHER_PID_VARIABLE,
    STOPPED_STATUS,
    NotMetError,
    RequestError,
    StoppedError,
    end_status,
)
from accbench.recording import records, terminal


def report(error: BaseException, topology: Topology, run_dir: Path | None) -> int:
    """Report an error once and where it belongs, and return the exit status."""
    name, text = type(error).__name__, "".join(traceback.format_exception(error))
    if isinstance(error, StoppedError):
        # Written here, because whoever asked for the stop may kill the launcher before it can.
        _record(topology, run_dir, end_status(name, str(error)), str(error))
    error_file = os.environ.get(ERROR_FILE_VARIABLE)
    if error_file is not None and not _launcher_is_gone():
        # The launcher tells the person, and ends the record.
        error_file = error_file.replace("{local_rank}", str(topology.local_rank))
        error_file = error_file.replace("{rank}", str(topology.rank))
        details = {
            "unix_time": time.time(), "rank": topology.rank, "name": name, "message": str(error),
            "traceback": text,
        }  # fmt: skip
        with Path(error_file).open("r+") as file:  # over blanks that reserve its space
            file.write(json.dumps(details))
        if run_dir is not None:
            with (
                contextlib.suppress(OSError),
                terminal.log_file(run_dir, topology.rank).open("ab") as file,
            ):
                file.write(text.encode(errors="backslashreplace"))
    elif isinstance(error, RequestError | StoppedError):
        if topology.rank == 0 or isinstance(error, NotMetError):
            print(f"main.py: {error}", file=sys.stderr)
    else:
        print(text, file=sys.stderr)
        _record(topology, run_dir, end_status(name, str(error)), f"rank 0: {name}: {error}")
    if isinstance(error, RequestError):
        return 2
    if isinstance(error, StoppedError):
        return STOPPED_STATUS
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _launcher_is_gone() -> bool:
    launcher = os.environ.get(LAUNCHER_PID_VARIABLE)
    return launcher is not None and os.getppid() != int(launcher)


def _record(topology: Topology, run_dir: Path | None, status: str, why: str) -> None:
    """End the run's record, on rank 0."""
    if run_dir is not None and topology.rank == 0:
        with contextlib.suppress(RequestError):
            records.append_failure(run_dir / config.RECORDS_FILE, status, why)
