"""Processes of one machine: a free port, and the ranks of a process group."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def free_port() -> int:
    """Return a port of this machine at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def rank_environments(num_ranks: int) -> list[dict[str, str]]:
    """Return the environment variables of each rank, as torchrun sets them, one thread a rank."""
    of_all = {
        "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks),
    }  # fmt: skip
    return [{**of_all, "RANK": rank, "LOCAL_RANK": rank} for rank in map(str, range(num_ranks))]


def run_ranks(num_ranks: int, arguments: list[str], env: dict[str, str]) -> None:
    """Run `python ARGUMENTS` once a rank, to the end of all; a failed rank is no error here."""
    started = [
        subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env={**os.environ, **env, **rank})
        for rank in rank_environments(num_ranks)
    ]
    for process in started:
        process.wait()
