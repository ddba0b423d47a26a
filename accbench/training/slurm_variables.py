"""What srun tells a task through its environment, in torchrun's words.

The names are those of Slurm's own manual, srun(1), "output environment variables".
"""

import os
import re

from accbench.errors import MEETING_VARIABLE


def adopt() -> None:
    """Take this worker's place from Slurm, where a job of accbench's has started it."""
    if "SLURM_PROCID" in os.environ and os.environ.get(MEETING_VARIABLE, "").startswith("file:"):
        os.environ.update(as_torchrun(os.environ))


def as_torchrun(variables: "os._Environ[str] | dict[str, str]") -> dict[str, str]:
    """RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE of a task."""
    of_nodes = tasks_per_node(variables["SLURM_STEP_TASKS_PER_NODE"])
    return {
        "RANK": variables["SLURM_PROCID"],
        "LOCAL_RANK": variables["SLURM_LOCALID"],
        "WORLD_SIZE": variables["SLURM_STEP_NUM_TASKS"],
        "LOCAL_WORLD_SIZE": str(of_nodes[int(variables["SLURM_NODEID"])]),
    }


def tasks_per_node(counts: str) -> list[int]:
    """Slurm's short form, by node: "2(x3),1" is 2, 2, 2, 1."""
    found: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"{counts!r} is not as Slurm counts tasks")
        found += [int(match[1])] * int(match[2] or 1)
    return found
