"""A Slurm of one node, from Debian's packages slurm-wlm and munge, in a folder of its own."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "squeue", "scontrol")


def is_installed() -> bool:
    """Whether its programs are here; it has to be started by root."""
    return os.geteuid() == 0 and all(shutil.which(program) for program in PROGRAMS)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[dict[str, str]]:
    """Start it; gives the environment in which its commands find it."""
    config, socket_path = folder / "slurm.conf", folder / "munge.socket"
    config.write_text(_config(folder, socket_path))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    environment = {**os.environ, "SLURM_CONF": str(config)}
    commands = (
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket_path}",
         f"--pid-file={folder / 'munge.pid'}", f"--log-file={folder / 'munge.log'}",
         f"--seed-file={folder / 'munge.seed'}"],
        ["slurmctld", "-D", "-f", str(config)],
        ["slurmd", "-D", "-f", str(config)],
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / "out.log").open("wb"))
        for command in commands:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            stack.callback(_end, process)
            if command[0] == "munged":
                _until(socket_path.exists)
        _until(lambda: "idle" in _said("sinfo", "-h", "-o", "%T", env=environment))
        yield environment


def _config(folder: Path, munge: Path) -> str:
    host = socket.gethostname()
    controller, node = _free_ports()
    for name in ("state", "spool"):
        (folder / name).mkdir()
    return f"""
ClusterName=accbench
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge},cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
MinJobAge=300
SchedulerParameters=sched_interval=1,bf_interval=1
NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()}
PartitionName=main Nodes={host} Default=YES
"""


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as two:
        for probe in (one, two):
            probe.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]


def _said(*command: str, env: dict[str, str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, env=env).stdout


def _until(is_so) -> None:
    until = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < until, "Slurm does not start"
        time.sleep(0.1)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    process.wait()
