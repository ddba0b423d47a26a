"""A run's output: rank 0's log lines, a progress bar on a terminal, and a log file a rank."""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)  # fmt: skip

from accbench.errors import RequestError
from accbench.recording.records import EvalRecord, WindowRecord
from accbench.system import standard_streams

log = logging.getLogger("accbench")


def log_file(run_dir: Path, rank: int) -> Path:
    """Return the file that a rank's output goes to."""
    return run_dir / "logs" / f"rank{rank}.log"


def person_console(stderr: bool = False) -> Console:
    """Return the console for standard output, or for standard error.

    In a notebook it is not a terminal, as a notebook would keep every state of a progress bar.
    """
    in_notebook = "JPY_PARENT_PID" in os.environ  # Jupyter sets it for its kernels
    force = False if in_notebook else None
    return Console(highlight=False, soft_wrap=True, force_terminal=force, stderr=stderr)


@contextlib.contextmanager
def worker_output(run_dir: Path, rank: int) -> Iterator[Console | None]:
    """Redirect a worker's output until the block ends.

    Rank 0 writes its log lines to its file and to the terminal, and the block gets its console. All
    output of other ranks goes to their files, also what compiled code writes to file descriptors 1
    and 2; their block gets None.

    Raises:
        RequestError: the file cannot be written.
    """
    path = log_file(run_dir, rank)
    log.setLevel(logging.INFO)
    log.propagate = False
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            to_file = _LogFileHandler(path, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise RequestError(f"cannot write {path}: {error.strerror}") from None
        to_file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        _attach(to_file, stack)
        if rank != 0:
            stack.enter_context(redirect_descriptors(path))
            yield None
            return
        console = person_console()
        _attach(_console_handler(console), stack)
        yield console


class _LogFileHandler(logging.FileHandler):
    """A log file that skips lines which a full disk does not take; the records tell of that."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


class _OutputHandler(logging.StreamHandler):
    """Log lines on standard output, dropped once its reader is gone: the log file has them all."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if isinstance(sys.exc_info()[1], BrokenPipeError):
            standard_streams.discard_output()
        else:
            super().handleError(record)


def _attach(handler: logging.Handler, stack: contextlib.ExitStack) -> None:
    log.addHandler(handler)
    stack.callback(handler.close)
    stack.callback(log.removeHandler, handler)


def _console_handler(console: Console) -> logging.Handler:
    if not console.is_terminal:
        handler = _OutputHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        return handler
    # It writes through the console, so that lines and the bar do not overwrite each other.
    return RichHandler(console=console, show_time=False, show_level=False, show_path=False)


@contextlib.contextmanager
def redirect_descriptors(path: Path, numbers: tuple[int, ...] = (1, 2)) -> Iterator[list[int]]:
    """Append all writes to these file descriptors, compiled code's too, to `path`.

    Yields duplicates of the original descriptors.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    originals = [os.dup(number) for number in numbers]
    with path.open("ab") as file:
        for number in numbers:
            os.dup2(file.fileno(), number)
    try:
        yield originals
    finally:
        with contextlib.suppress(OSError):  # the file's disk may be full
            sys.stdout.flush()
            sys.stderr.flush()
        for number, original in zip(numbers, originals, strict=True):
            os.dup2(original, number)
            os.close(original)


@contextlib.contextmanager
def redirect_stderr(path: Path) -> Iterator[int]:
    """Append all writes to standard error to `path`; yields a duplicate of the original descriptor.

    torch's sockets warn there, from C++, of each connection whose other end has no name.
    """
    with redirect_descriptors(path, (2,)) as (original,):
        yield original


# Seconds after which a step is reported as long; then at twice the time, and so on.
LONG_STEP_S = 15.0


class TrainingDisplay:
    """Log lines for windows and evaluations, and on a terminal a progress bar over all steps.

    Args:
        console: rank 0's console; None on other ranks.
        num_steps: steps of the whole run; None where they are not known.
        counted: the unit of speed and units a sample, as `RunRecord.counted`.
    """

    def __init__(
        self, console: Console | None, num_steps: int | None, counted: tuple[str, int]
    ) -> None:
        self._progress = Progress(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"),
            TextColumn("{task.fields[speed]}"), TimeElapsedColumn(), TimeRemainingColumn(),
            console=console, transient=True, disable=console is None or not console.is_terminal,
        )  # fmt: skip
        self._bar = self._progress.add_task("training", total=num_steps, speed="")
        self.num_steps = num_steps
        self._has_console = console is not None
        self._step_done = threading.Event()
        self.unit, self.units_per_sample = counted

    def __enter__(self) -> "TrainingDisplay":
        self._progress.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def set_num_steps(self, num_steps: int) -> None:
        """Set the steps of the whole run."""
        self.num_steps = num_steps
        self._progress.update(self._bar, total=num_steps)

    def step(self, num_steps: int) -> None:
        """Move the bar to `num_steps` steps done."""
        self._progress.update(self._bar, completed=num_steps)
        self._step_done.set()

    @contextlib.contextmanager
    def report_long_steps(self, compiler: str | None) -> Iterator[None]:
        """Report while a step in the block takes long, as steps do that compile."""
        if compiler is None or not self._has_console:
            yield
            return
        ended = threading.Event()
        thread = threading.Thread(
            target=self._report_while_long, args=(compiler, ended), daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            ended.set()
            self._step_done.set()
            thread.join()

    def _report_while_long(self, compiler: str, ended: threading.Event) -> None:
        tell_after_s, began = LONG_STEP_S, time.monotonic()
        while not ended.is_set():
            if self._step_done.wait(min(1.0, LONG_STEP_S)):
                self._step_done.clear()
                tell_after_s, began = LONG_STEP_S, time.monotonic()
                continue
            so_far_s = time.monotonic() - began
            if so_far_s < LONG_STEP_S:
                continue
            status = f"{compiler} has been compiling, or the step runs, for {so_far_s:.0f} s"
            self._progress.update(self._bar, speed=status)
            if so_far_s >= tell_after_s and self._progress.disable:
                tell_after_s *= 2
                log.info(f"{status}; large models take minutes")

    def window(self, record: WindowRecord, batch_size: int) -> None:
        """Log a line for a window."""
        done = record.first_step + record.num_steps
        step_s = record.wall_s / record.num_steps
        of_all = "" if self.num_steps is None else f"/{self.num_steps}"
        units_per_s = record.num_samples * self.units_per_sample / record.wall_s
        speed = f"loss {_loss_text(record.loss)}  {units_per_s:.1f} {self.unit}/s"
        self._progress.update(self._bar, speed=speed)
        log.info(
            f"epoch {record.epoch}  step {done}{of_all}  batch {batch_size}  {speed}"
            f"  {step_s:.3f} s/step  peak {record.peak_memory_bytes / 2**30:.2f} GiB"
            + ("  (warm-up)" if record.warmup else "")
        )

    def evaluation(self, record: EvalRecord) -> None:
        """Log a line for an evaluation."""
        log.info(
            f"epoch {record.epoch}  evaluated {record.num_samples} {self.unit}  "
            f"{'averaged weights  ' if record.averaged else ''}"
            f"loss {_loss_text(record.loss)}  "
            f"top-1 {_percent(record.top1)}  top-5 {_percent(record.top5)}"
        )


def _loss_text(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
