"""srun's environment variables, translated to torchrun's.

The names are those of Slurm's own manual, srun(1), "output environment variables".
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping

from accbench.errors import MEETING_VARIABLE, RequestError

# A step's number chooses one of these ports, which lie below those that Linux assigns itself.
_FIRST_PORT, _NUM_PORTS = 15000, 10000
_OTHER_LAUNCHERS = {"OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "MPI"}


def adopt() -> None:
    """Set torchrun's variables from Slurm's, if Slurm started this worker.

    Either accbench's job or a plain `srun` may have started it.

    Raises:
        RequestError: another launcher has started several processes, which would be separate
            runs; or the first node of a step is unknown.
    """
    variables = os.environ
    if "SLURM_PROCID" in variables and variables.get(MEETING_VARIABLE, "").startswith("file:"):
        variables.update(as_torchrun(variables))
    elif "RANK" in variables or "WORLD_SIZE" in variables:
        return  # torchrun's variables, perhaps within a Slurm task
    elif _num_tasks(variables) > 1:
        variables.update(as_torchrun(variables))
        variables.setdefault("MASTER_ADDR", _first_node(variables))
        variables.setdefault("MASTER_PORT", str(_port(variables)))
    else:
        _refuse_others(variables)


def with_torchruns(variables: Mapping[str, str]) -> Mapping[str, str]:
    """Return an environment with torchrun's variables, also before `adopt` where srun began it."""
    is_torchruns = "RANK" in variables or "WORLD_SIZE" in variables
    if is_torchruns or _num_tasks(variables) == 1:
        return variables
    return {**variables, **as_torchrun(variables)}


def _num_tasks(variables: Mapping[str, str]) -> int:
    """Return the tasks of srun's step; 1 in a batch script and in an interactive shell."""
    needed = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE")
    if any(name not in variables for name in needed):
        return 1
    return int(variables.get("SLURM_STEP_NUM_TASKS", 1))


def _first_node(variables: Mapping[str, str]) -> str:
    if int(variables.get("SLURM_STEP_NUM_NODES", 1)) == 1:
        return "127.0.0.1"
    nodes = variables.get("SLURM_STEP_NODELIST", "")
    if re.fullmatch(r"[\w.-]+(,[\w.-]+)*", nodes):
        return nodes.split(",")[0]
    scontrol = shutil.which("scontrol")
    if scontrol is not None:
        hostnames = subprocess.run(
            [scontrol, "show", "hostnames", nodes], capture_output=True, text=True, timeout=60
        )
        if hostnames.returncode == 0 and hostnames.stdout.split():
            return hostnames.stdout.split()[0]
    raise RequestError(
        f"srun started several tasks on {nodes or 'several nodes'}, the first of which is not "
        "known here: set MASTER_ADDR to its name, or use --launcher slurm"
    )


def _port(variables: Mapping[str, str]) -> int:
    numbers = [variables.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    job, step = (int(number) if number.isdigit() else 0 for number in numbers)
    return _FIRST_PORT + (job * 17 + step) % _NUM_PORTS


def _refuse_others(variables: Mapping[str, str]) -> None:
    for name, launcher in _OTHER_LAUNCHERS.items():
        size = variables.get(name, "1")
        if size.isdigit() and int(size) > 1:
            raise RequestError(
                f"{launcher} started {size} processes ({name}), which would be as many separate "
                f"runs: start them by torchrun --nproc_per_node={size}, or set RANK, WORLD_SIZE, "
                "LOCAL_RANK, MASTER_ADDR and MASTER_PORT in each"
            )


def as_torchrun(variables: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE of a Slurm task."""
    node_tasks = tasks_per_node(variables["SLURM_STEP_TASKS_PER_NODE"])
    return {
        "RANK": variables["SLURM_PROCID"],
        "LOCAL_RANK": variables["SLURM_LOCALID"],
        "WORLD_SIZE": variables["SLURM_STEP_NUM_TASKS"],
        "LOCAL_WORLD_SIZE": str(node_tasks[int(variables["SLURM_NODEID"])]),
    }


def tasks_per_node(counts: str) -> list[int]:
    """Parse Slurm's short form of tasks by node: "2(x3),1" is 2, 2, 2, 1."""
    tasks: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"{counts!r} is not as Slurm counts tasks")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks
