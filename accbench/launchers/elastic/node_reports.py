"""Final reports of the nodes to the host: how each ended, and its logs if no disk is shared."""

import contextlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.distributed import Store

from accbench import config
from accbench.config import TaskConfig
from accbench.errors import RequestError
from accbench.launchers import Failure
from accbench.launchers.elastic import rendezvous

# Bytes at the end of each log that a node sends.
_LOG_BYTES = 1 << 20
# Seconds until a file that the host created is visible on a shared disk.
_VISIBLE_S = 2.0


@dataclass(frozen=True)
class Report:
    """A node's end: its failure, and whether it took part in the last meeting."""

    failure: Failure | None
    meeting: str | None
    """The last meeting of its workers; None if there was none, or the node was one too many."""


def marker_file(folder: Path, run_id: str) -> Path:
    """Return the file in the run's folder by which a node knows that it shares the host's disk.

    The host creates it. The task's file would not do: a restart writes another checkpoint there.
    """
    return folder / f".{run_id}.shared"


def prepare_run_folder(folder: Path, task: dict[str, Any], run_id: str) -> tuple[TaskConfig, bool]:
    """Create the run's folder on this node unless it shares the host's, and read the task from it.

    Returns:
        The task, and whether this node shares the host's folder.

    Raises:
        RequestError: the folder cannot be created.
    """
    path = folder / config.CONFIG_FILE
    try:
        is_shared = _becomes_visible(marker_file(folder, run_id))
        if not is_shared:
            (folder / "logs").mkdir(parents=True, exist_ok=True)
            part = folder / f".{config.CONFIG_FILE}.{os.getpid()}.part"
            part.write_text(json.dumps(task, indent=1) + "\n")
            part.replace(path)
    except OSError as error:
        raise RequestError(
            f"cannot create the run's folder {folder} on this node, which needs the path of node "
            f"0: {error}; on node 0 name an --output_dir that all nodes can write to"
        ) from None
    return config.parse([f"--config={path}"]), is_shared


def _becomes_visible(path: Path) -> bool:
    deadline = time.monotonic() + _VISIBLE_S
    while path.parent.exists() and not path.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    return path.exists()


def send_report(store: Store, number: int, report: Report, logs_folder: Path | None) -> None:
    """Send the host this node's outcome.

    Args:
        store: the rendezvous's store.
        number: this node's number in the order of joining.
        report: the outcome.
        logs_folder: logs to send along; None where the host shares them.
    """
    logs = {}
    for path in () if logs_folder is None else sorted(logs_folder.iterdir()):
        logs[path.name] = path.read_bytes()[-_LOG_BYTES:].decode(errors="replace")
    try:
        rendezvous.publish(store, f"ended {number}", {**asdict(report), "logs": logs})
    except RuntimeError:  # the host is gone, which this node's own failure says
        return


def collect_reports(
    store: Store, numbers: Iterable[int], task: TaskConfig, seconds: float
) -> dict[int, Report]:
    """Return the report of each node that reports in time; logs go to the run's folder."""
    keys = {f"ended {number}": number for number in numbers}
    reports = {}
    for key, values in rendezvous.wait_for_published(store, list(keys), seconds).items():
        for name, text in values["logs"].items():
            with contextlib.suppress(OSError):  # such as a full disk; the outcome still counts
                (task.run_dir / "logs" / Path(name).name).write_text(text)
        failure = values["failure"]
        reports[keys[key]] = Report(
            None if failure is None else Failure(**failure), values["meeting"]
        )
    return reports
