"""Processes that trace and compile, each by itself: XLA reads flags once, and aborts on errors."""

import dataclasses
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from accbench import cache_folders

# What Abseil's logging puts before a line: severity, date, time, thread, place.
_LOG_HEAD = re.compile(r"^\S*\s*([IWEF])\S*\s+\S+\s+\S+\]\s*|^[\d-]+ [\d:.]+: [IWEF] \S+\]\s*")
_SAID_LAST = 300
_LOOK_EVERY_S = 0.2


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended."""

    status: int
    """Its exit status; a signal's number below zero."""
    peak_bytes: int
    """The most memory it had."""
    wall_s: float
    last_words: str
    """The line that tells why, of what it said on standard error; empty if it said nothing."""


def run(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path,
    waiting: Callable[[float], None],
) -> Ended:  # fmt: skip
    """Run `python -m module arguments` to its end; it dies with this process.

    Args:
        log: gets what it says.
        waiting: called now and then with the seconds passed.
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
                pid, status, used = os.wait4(process.pid, os.WNOHANG)
                if pid:
                    break
                waiting(time.perf_counter() - started)
                time.sleep(_LOOK_EVERY_S)
        except BaseException:  # Ctrl-C for one: nobody would be left to read what it makes
            process.kill()
            process.wait()
            raise
    process.returncode = os.waitstatus_to_exitcode(status)
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, getrusage(2)
    return Ended(
        process.returncode, used.ru_maxrss * unit, time.perf_counter() - started, _last_words(log)
    )


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    fatal = [line for line in lines if re.match(r"^(\S+ )?F\d|^F\d|.*: F ", line)]
    said = [line for line in lines if "Error" in line or "error" in line]
    for found in (fatal[:1], said[-1:], lines[-1:]):
        if found:
            return _LOG_HEAD.sub("", found[0])[:_SAID_LAST]
    return ""
