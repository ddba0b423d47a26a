"""Commands that tests send signals to, forked where that is the same (`tests.forked`)."""

import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import psutil

from tests.conftest import HANG_S, start_python, wait_for_windows, wait_until


class Signalled:
    """A command under way, with what is used of `subprocess.Popen` besides its processes.

    Args:
        words: what follows `python`.
        ignores_hangups: as under nohup.
        network: the namespace that it is in, as `ip netns` names it.
        env: beside the environment of now.
    """

    def __init__(
        self, words: Sequence[object], *, ignores_hangups: bool = False,
        network: str | None = None, **env: str,
    ) -> None:  # fmt: skip
        self._said: tuple[str, str] | None = None
        with tempfile.TemporaryDirectory() as folder:
            pid_file = Path(folder) / "pid"
            options = {"pid_file": str(pid_file), "ignores_hangups": ignores_hangups}
            if network is not None:
                options["network"] = network
            self._process = start_python("-m", "tests.started", json.dumps(options), *words, **env)
            wait_until(lambda: pid_file.exists() or self._process.poll() is not None)
            assert pid_file.exists(), self._process.end()
            self.pid = int(pid_file.read_text())

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self._process.wait(timeout)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; (out, err)."""
        self.wait(timeout)
        if self._said is None:
            self._said = self._process.end()
        return self._said

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def below(self) -> list[psutil.Process]:
        """All processes below it, as they are now."""
        return psutil.Process(self.pid).children(recursive=True)


def left_of(processes: Iterable[psutil.Process], timeout_s: float = HANG_S) -> list[psutil.Process]:
    """Those that still go on after so many seconds; returns sooner where none does."""
    given, deadline = [*processes], time.monotonic() + timeout_s
    while (left := [process for process in given if _goes_on(process)]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.1)
    return left


def _goes_on(process: psutil.Process) -> bool:
    try:
        # Nobody may fetch the status of one whose parent has gone.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def under_way(
    run_dir: Path, arguments: Sequence[str], num_windows: int, **options
) -> Iterator[Signalled]:
    """Like `tests.conftest.under_way`, whose processes start anew.

    Args:
        arguments: the command, as `command` gives it.
        options: of `Signalled`.
    """
    process = Signalled(arguments[1:], **options)
    try:
        wait_for_windows(process, run_dir, num_windows)
        yield process
    finally:
        process.kill()
        process.communicate(HANG_S)
