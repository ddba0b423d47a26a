"""Final reports of the nodes to the host: how each ended, and its logs if no disk is shared."""

import contextlib
import json
from collections.abc import Iterable
from dataclasses import asdict
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
_UNSHARED = ".kept-on-this-node"


def prepare_run_folder(folder: Path, task: dict[str, Any]) -> TaskConfig:
    """Create the run's folder on this node unless it shares the host's, and read the task from it.

    Raises:
        RequestError: the folder cannot be created.
    """
    path = folder / config.CONFIG_FILE
    try:
        is_shared = path.exists() and json.loads(path.read_text()) == task
        if not is_shared:
            (folder / "logs").mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(task, indent=1) + "\n")
            (folder / _UNSHARED).touch()
    except (OSError, ValueError) as error:
        raise RequestError(
            f"cannot create the run's folder {folder} on this node, which needs the path of node "
            f"0: {error}; on node 0 name an --output_dir that all nodes can write to"
        ) from None
    return config.parse([f"--config={path}"])


def send_report(store: Store, number: int, task: TaskConfig, failure: Failure | None) -> None:
    """Send the host this node's outcome, and its logs if it has a run folder of its own."""
    logs = {}
    if (task.run_dir / _UNSHARED).exists():
        for path in sorted((task.run_dir / "logs").iterdir()):
            logs[path.name] = path.read_bytes()[-_LOG_BYTES:].decode(errors="replace")
    report = {"failure": None if failure is None else asdict(failure), "logs": logs}
    try:
        rendezvous.publish(store, f"ended {number}", report)
    except RuntimeError:  # the host is gone, which this node's own failure says
        return


def collect_reports(
    store: Store, numbers: Iterable[int], task: TaskConfig, seconds: float
) -> dict[int, Failure | None]:
    """Return the outcome of each node that reports in time; logs go to the run's folder."""
    keys = {f"ended {number}": number for number in numbers}
    outcomes = {}
    for key, report in rendezvous.wait_for_published(store, list(keys), seconds).items():
        for name, text in report["logs"].items():
            with contextlib.suppress(OSError):  # such as a full disk; the outcome still counts
                (task.run_dir / "logs" / Path(name).name).write_text(text)
        failure = report["failure"]
        outcomes[keys[key]] = None if failure is None else Failure(**failure)
    return outcomes
