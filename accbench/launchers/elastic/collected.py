"""What nodes tell the host at their end: how it went, and their logs where no folder is shared."""

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
from accbench.launchers.elastic import meeting

# Bytes at the end of each log that travel.
_LOG_BYTES = 1 << 20
_UNSHARED = ".kept-on-this-node"


def take_over(folder: Path, task: dict[str, Any]) -> TaskConfig:
    """The run's folder on this node, which most often is the host's own, on a shared disk.

    Raises:
        RequestError: it cannot be made.
    """
    path = folder / config.CONFIG_FILE
    try:
        shared = path.exists() and json.loads(path.read_text()) == task
        if not shared:
            (folder / "logs").mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(task, indent=1) + "\n")
            (folder / _UNSHARED).touch()
    except (OSError, ValueError) as error:
        raise RequestError(
            f"cannot make the run's folder {folder} on this node, where it is to be as on node 0: "
            f"{error}; name an --output_dir there that all nodes can write to"
        ) from None
    return config.parse([f"--config={path}"])


def give(store: Store, number: int, task: TaskConfig, failure: Failure | None) -> None:
    """Tell the host how this node ended."""
    logs = {}
    if (task.run_dir / _UNSHARED).exists():
        for path in sorted((task.run_dir / "logs").iterdir()):
            logs[path.name] = path.read_bytes()[-_LOG_BYTES:].decode(errors="replace")
    told = {"failure": None if failure is None else asdict(failure), "logs": logs}
    try:
        meeting.publish(store, f"ended {number}", told)
    except RuntimeError:  # the host is gone, and this node says so itself
        return


def take(
    store: Store, numbers: Iterable[int], task: TaskConfig, seconds: float
) -> dict[int, Failure | None]:
    """How the nodes ended, of those that tell so in time; their logs go into the run's folder."""
    keys = {f"ended {number}": number for number in numbers}
    ended = {}
    for key, told in meeting.published_soon(store, list(keys), seconds).items():
        for name, text in told["logs"].items():
            with contextlib.suppress(OSError):  # a full disk; how it ended is told all the same
                (task.run_dir / "logs" / Path(name).name).write_text(text)
        ended[keys[key]] = None if told["failure"] is None else Failure(**told["failure"])
    return ended
