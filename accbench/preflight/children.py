"""Child processes for tracing and compiling: XLA reads its flags once, and aborts on errors."""

import dataclasses
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from accbench.system import cache_folders

# The prefix of Abseil's log lines: severity, date, time, thread, source location.
_LOG_PREFIX = re.compile(
    r"^\S*\s*([IWEF])\S*\s+\S+(?:\s+\d+)?\s+\S+\]\s*|^[\d-]+ [\d:.]+: [IWEF] \S+\]\s*"
)
_MESSAGE_CHARACTERS = 300
_POLL_S = 0.2


@dataclasses.dataclass(frozen=True)
class ProcessResult:
    """The exit status, memory, time and last message of a process that ended."""

    status: int
    """The exit status; minus the signal's number if a signal killed it."""
    peak_bytes: int
    """Peak resident memory."""
    wall_s: float
    last_message: str
    """The line of its log that best explains the end; empty if the log is empty."""


def run(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path,
    on_wait: Callable[[float], None],
) -> ProcessResult:  # fmt: skip
    """Run `python -m module arguments` until it ends; it dies with this process.

    Args:
        module: a module whose `main` takes a list of arguments.
        arguments: command-line arguments.
        environment: variables to add to this process's own.
        log: file that receives standard output and standard error.
        on_wait: called several times a second with the seconds passed.
    """
    command = [sys.executable, "-m", "accbench.preflight.child", str(os.getpid()), module]
    environment = {**os.environ, **cache_folders.environment(log.parent), **environment}
    started = time.perf_counter()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, *arguments], env=environment, stdin=subprocess.DEVNULL,
            stdout=file, stderr=file,
        )  # fmt: skip
        try:
            while True:
                pid, status, usage = os.wait4(process.pid, os.WNOHANG)
                if pid:
                    break
                on_wait(time.perf_counter() - started)
                time.sleep(_POLL_S)
        except BaseException:  # such as Ctrl-C: nobody is left to read the child's results
            process.kill()
            process.wait()
            raise
    process.returncode = os.waitstatus_to_exitcode(status)
    maxrss_unit = 1 if sys.platform == "darwin" else 1024  # bytes, getrusage(2)
    return ProcessResult(
        process.returncode,
        usage.ru_maxrss * maxrss_unit,
        time.perf_counter() - started,
        _last_message(log),
    )


def _last_message(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    fatal = [line for line in lines if re.match(r"^(\S+ )?F\d|^F\d|.*: F ", line)]
    errors = [line for line in lines if "Error" in line or "error" in line]
    for candidates in (fatal[:1], errors[-1:], lines[-1:]):
        if candidates:
            return _LOG_PREFIX.sub("", candidates[0])[:_MESSAGE_CHARACTERS]
    return ""
