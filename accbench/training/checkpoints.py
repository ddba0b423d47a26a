"""A run's checkpoints: written in the background, found again, old ones removed.

The newest few and the best one are kept.
"""

import contextlib
import itertools
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from accbench import config
from accbench.errors import RequestError
from accbench.recording import records
from accbench.recording.records import CheckpointRecord
from accbench.training import checkpoint_file
from accbench.training.checkpoint_file import Checkpoint, CheckpointFacts, DamagedError

FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d{9,})")


def folder_of(run_dir: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` steps."""
    return run_dir / FOLDER / f"step-{step:09}"


def steps_of(run_dir: Path) -> list[int]:
    """Return the steps of all checkpoints on disk, complete or damaged, the newest first."""
    folder = run_dir / FOLDER
    if not folder.is_dir():
        return []
    matches = (_NAME.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def find(resume: str, run_dir: Path | None, warn: Callable[[str], None]) -> Path | None:
    """Find and verify the checkpoint that `--resume` means; return None if auto finds none.

    Args:
        resume: auto, a run's folder, or a checkpoint's.
        run_dir: the run's own folder, where auto looks; None for a new folder.
        warn: called with a line on each damaged checkpoint that is skipped.

    Raises:
        RequestError: the named checkpoint does not exist, or all checkpoints are damaged.
    """
    if resume == "auto":
        return None if run_dir is None else _newest_to_resume(run_dir, warn)
    path = Path(resume)
    if (path / checkpoint_file.JSON_FILE).exists() or _NAME.fullmatch(path.name):
        try:
            checkpoint_file.verify(path)
        except DamagedError as error:
            raise RequestError(f"--resume {resume}: {error}") from None
        return path.absolute()
    if not path.is_dir():
        raise RequestError(f"--resume {resume}: there is no such folder")
    newest_whole = _newest_to_resume(path, warn)
    if newest_whole is None:
        raise RequestError(f"--resume {resume}: no checkpoint is in it")
    return newest_whole.absolute()


def _newest_to_resume(run_dir: Path, warn: Callable[[str], None]) -> Path | None:
    try:
        return newest(run_dir, warn)
    except DamagedError as error:
        raise RequestError(
            f"no checkpoint in {run_dir / FOLDER} is whole ({error}); to start from the "
            "beginning choose another --output_dir"
        ) from None


def newest(run_dir: Path, warn: Callable[[str], None]) -> Path | None:
    """Find a run's newest whole checkpoint; return None if the run has none at all.

    Args:
        run_dir: the run's folder.
        warn: called with a line on each damaged checkpoint that is skipped.

    Raises:
        DamagedError: all are damaged; what is wrong with the newest.
    """
    damaged = []
    for step in steps_of(run_dir):
        try:
            checkpoint_file.verify(folder_of(run_dir, step))
        except DamagedError as error:
            damaged.append(error)
            continue
        for problem in damaged:
            warn(f"passed over a damaged checkpoint: {problem}; going on from step {step}")
        return folder_of(run_dir, step)
    if damaged:
        raise damaged[0]
    return None


def clean(run_dir: Path) -> None:
    """Remove what a killed writer has left; the caller must hold the run's folder.

    A checkpoint that was just being replaced gets its name back.
    """
    for leftover in (run_dir / FOLDER).glob(".*"):
        name = _NAME.match(leftover.name[1:])
        if name and leftover.name.endswith(checkpoint_file.REPLACED):
            with contextlib.suppress(OSError):  # the newer one has the name
                leftover.rename(leftover.with_name(name[0]))
        shutil.rmtree(leftover, ignore_errors=True)


def set_later_aside(run_dir: Path, step: int) -> Path | None:
    """Move the checkpoints after `step` to where they do not count; return that folder.

    Returns None if there are none.

    Raises:
        OSError: they cannot be moved.
    """
    later = [other for other in steps_of(run_dir) if other > step]
    if not later:
        return None
    names = (run_dir / FOLDER / f"abandoned-{number}" for number in itertools.count(1))
    aside = next(path for path in names if not path.exists())
    aside.mkdir()
    for other in later:
        folder = folder_of(run_dir, other)
        folder.rename(aside / folder.name)
    return aside


def _best(facts: dict[int, CheckpointFacts]) -> int | None:
    """Return the step with the highest top-1, or with the lowest loss if none has a top-1."""
    scores = {step: fact.top1 for step, fact in facts.items() if fact.top1 is not None}
    if not scores:
        scores = {step: -fact.loss for step, fact in facts.items() if fact.loss is not None}
    return max(scores, key=lambda step: (scores[step], step), default=None)


class Writer:
    """Writes one checkpoint at a time in a thread, on rank 0; training goes on meanwhile.

    Args:
        run_dir: the run's folder.
        keep: how many of the newest checkpoints stay. The best one stays as well, see `_best`.
        stop_on_error: whether a checkpoint that cannot be written ends the run.
        warn: called with a line on a failure that does not end the run.
    """

    def __init__(
        self, run_dir: Path, keep: int, stop_on_error: bool, warn: Callable[[str], None]
    ) -> None:
        self.run_dir, self.keep = run_dir, keep
        self._stop_on_error, self._warn = stop_on_error, warn
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, checkpoint: Checkpoint, stall_s: float, at_once: bool = False) -> None:
        """Begin to write a checkpoint, after waiting for the one before.

        Args:
            checkpoint: what to write.
            stall_s: seconds for which training stood still to read the state.
            at_once: whether to return only when it is written.

        Raises:
            RequestError: the checkpoint before could not be written, and that ends the run.
        """
        begun = time.perf_counter()
        self.finish()
        stall_s += time.perf_counter() - begun
        if at_once:
            self._write(checkpoint, stall_s)
            self.finish()
            return
        self._thread = threading.Thread(
            target=self._write, args=(checkpoint, stall_s), name="checkpoint"
        )
        self._thread.start()

    def _write(self, checkpoint: Checkpoint, stall_s: float) -> None:
        folder = folder_of(self.run_dir, checkpoint.facts.step)
        began = time.perf_counter()
        try:
            num_bytes = checkpoint_file.write(folder, checkpoint)
            self._remove_old()
        except Exception as error:  # `finish` raises it, so that nobody believes that all is saved
            self._error = error
            return
        record = CheckpointRecord(
            step=checkpoint.facts.step, epoch=checkpoint.facts.epoch, path=str(folder),
            num_bytes=num_bytes, stall_s=stall_s, write_s=time.perf_counter() - began,
        )  # fmt: skip
        try:
            records.append(self.run_dir / config.RECORDS_FILE, record)
        except RequestError as error:
            self._error = OSError(0, str(error))

    def _remove_old(self) -> None:
        """Remove old checkpoints; called only once the new one is on the disk."""
        facts = {}
        for step in steps_of(self.run_dir):
            try:
                facts[step] = checkpoint_file.read_facts(folder_of(self.run_dir, step))
            except DamagedError:
                continue  # not removed: perhaps a newer version of accbench wrote it
        best = _best(facts)
        for step in list(facts)[self.keep :]:
            if step != best:
                checkpoint_file.remove(folder_of(self.run_dir, step))

    def finish(self) -> None:
        """Wait until the checkpoint being written is on the disk.

        Raises:
            RequestError: it could not be written, and that ends the run.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            if not isinstance(error, OSError):
                raise error
            why = f"cannot write a checkpoint to {self.run_dir / FOLDER}: {error.strerror}"
            if self._stop_on_error:
                raise RequestError(f"{why}; the ones before are whole, go on with --resume auto")
            self._warn(f"{why}; training goes on")
