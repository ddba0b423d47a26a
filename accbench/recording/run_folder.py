"""A run's folder: created, locked while the run goes on, and holding the task."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path

from accbench.config import CONFIG_FILE, RECORDS_FILE, TaskConfig, as_mapping
from accbench.errors import RequestError
from accbench.system import folders


@contextlib.contextmanager
def claim_output_dir(task: TaskConfig) -> Iterator[TaskConfig]:
    """Create the run's folder, lock it for the block, and write the task into it.

    Where `--resume` finds a task in it, the caller replaces that.

    Raises:
        RequestError: the folder cannot be written, holds another run's records, or another
            process is at work in it.
    """
    with contextlib.ExitStack() as stack:
        try:
            if task.output_dir is None:
                label = Path(task.script).stem if task.script else task.model.split(":")[-1]
                folder = folders.create_run_folder(f"{task.engine}-{label}")
            else:
                folder = Path(task.output_dir)
                folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(folders.lock(folder))
            if (folder / RECORDS_FILE).exists() and not _resumes_here(task, folder):
                raise RequestError(
                    f"{folder} already holds a run; choose another --output_dir, or resume it "
                    "with --resume auto"
                )
            (folder / "logs").mkdir(exist_ok=True)
            task = dataclasses.replace(task, output_dir=str(folder.absolute()))
            # A run that is there keeps its task until the checkpoint is known to fit the new one.
            if task.resume is None or not (folder / CONFIG_FILE).exists():
                write(task)
        except OSError as error:
            where = task.output_dir or "runs"
            raise RequestError(
                f"cannot write to --output_dir {where}: {error.strerror}; name one that can be "
                "written"
            ) from None
        yield task


def _resumes_here(task: TaskConfig, folder: Path) -> bool:
    """Return whether `--resume` refers to the run in this folder."""
    if task.resume is None or task.resume == "auto":
        return task.resume is not None
    resumed = Path(task.resume).resolve()
    # Not one that was set aside: the record no longer has what that training did.
    return folder.resolve() in (resumed, resumed.parent.parent)


def write(task: TaskConfig) -> None:
    """Write the task into its run's folder, where `--config` can read it; all of it or nothing.

    Raises:
        OSError: it cannot be written.
    """
    part = task.run_dir / f".{CONFIG_FILE}.{os.getpid()}.part"
    try:
        part.write_text(json.dumps(as_mapping(task), indent=1) + "\n")
        part.replace(task.run_dir / CONFIG_FILE)
    except OSError:
        part.unlink(missing_ok=True)
        raise
