"""The device plug-in, through torch_xla itself: every test is a process with PJRT_DEVICE=CUDA."""

import _ctypes
import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.conftest import HANG_S, ROOT, free_port

from .fake_cuda import make_driver

pytest.importorskip("torch_xla")
pytestmark = pytest.mark.xla

REGISTERED = "CUDA" in entry_points(group="torch_xla.plugins").names
needs_registration = pytest.mark.skipif(not REGISTERED, reason="accbench is not installed")
# As accbench's own engine does where the entry point is missing.
REGISTER = """
from torch_xla.experimental import plugins
from accbench.pjrt import cuda
plugins.register_plugin("CUDA", cuda.plugin())
"""
ASK_DEVICE = "import torch_xla\n" + REGISTER + "print(torch_xla.device())"


def start(program: str, **env: str) -> "subprocess.Popen[str]":
    dropped = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "XLA_FLAGS",
               "CUDA_VISIBLE_DEVICES", "XLA_COORDINATOR_PORT", "ACCBENCH_CUDA_PLUGIN")  # fmt: skip
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**kept, "PJRT_DEVICE": "CUDA", **env},
    )  # fmt: skip


@needs_registration
def test_the_entry_point_registers_and_a_missing_gpu_is_told_in_one_line(tmp_path: Path) -> None:
    """Plain torch_xla, nothing of accbench imported by the program."""
    driver = make_driver(tmp_path, num_gpus=0, status=100)
    process = start("import torch_xla; torch_xla.device()", LD_LIBRARY_PATH=str(driver))
    _, stderr = process.communicate(timeout=HANG_S)
    assert process.returncode == 1, stderr  # an exception's, not an abort's
    assert stderr.splitlines()[-1] == (
        "RuntimeError: torch_xla cannot use CUDA: the NVIDIA driver finds no GPU "
        "(CUDA_ERROR_NO_DEVICE); use PJRT_DEVICE=CPU"
    )


OPTIONS_OF_RANKS = (
    "import json, os, torch_xla"
    + REGISTER
    + """
plugin, answers = cuda.CudaPlugin(), []
os.environ.update(WORLD_SIZE="8", LOCAL_WORLD_SIZE="4")
for rank in range(8):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank % 4))
    answers.append(plugin.client_create_options())
os.environ["MASTER_PORT"] = "29500"
ports = [cuda.coordinator_port()]
os.environ["MASTER_PORT"] = "65535"
ports.append(cuda.coordinator_port())
print(json.dumps([answers, plugin.physical_chip_count(), ports]))
os.environ.update(PJRT_ALLOCATOR_CUDA_ASYNC="1", PJRT_ALLOCATOR_FRACTION="0.5",
                  PJRT_ALLOCATOR_PREALLOCATE="true")
print(json.dumps(plugin.client_create_options()))
"""
)


def test_options_of_eight_ranks_on_two_machines_of_four(tmp_path: Path) -> None:
    process = start(OPTIONS_OF_RANKS, LD_LIBRARY_PATH=str(make_driver(tmp_path, num_gpus=4)))
    stdout, stderr = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, stderr
    default_line, changed_line = stdout.splitlines()
    answers, chips, ports = json.loads(default_line)
    assert [options["node_id"] for options in answers] == list(range(8))
    assert [options["visible_devices"] for options in answers] == [[n % 4] for n in range(8)]
    assert {options["num_nodes"] for options in answers} == {8}
    assert answers[0]["platform_name"] == "cuda"
    assert answers[0]["allocator"] == "default"
    assert answers[0]["memory_fraction"] == 0.75
    assert answers[0]["preallocate"] is False
    assert chips == 4
    assert ports == [29501, 65534]
    changed = json.loads(changed_line)
    assert changed["allocator"] == "cuda_async"
    assert changed["memory_fraction"] == 0.5
    assert changed["preallocate"] is True


def test_two_processes_meet_at_the_coordinator_beside_the_rendezvous(tmp_path: Path) -> None:
    """Both clients connect; the library that comes next is no PJRT plugin, so they end there.

    Rank 0 holds the coordinator. It may not end before rank 1 has its answer, and its
    library is one whose opening waits for a writer that never comes.
    """
    driver = make_driver(tmp_path, num_gpus=2)
    never_opens = tmp_path / "plugin.so"
    os.mkfifo(never_opens)
    rendezvous_port = free_port() - 1
    processes = [
        start(
            ASK_DEVICE, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(rendezvous_port),
            LD_LIBRARY_PATH=str(driver),
            ACCBENCH_CUDA_PLUGIN=_ctypes.__file__ if rank else str(never_opens),
            TF_CPP_MIN_LOG_LEVEL="0", TF_CPP_VMODULE="pjrt_registry=5",
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for rank, process in enumerate(processes):
            lines = read_until(process, "Connected to distributed JAX controller")
            assert f"rank={rank}, world size=2" in lines
            assert f"coordinator address=127.0.0.1:{rendezvous_port + 1}" in lines
        assert processes[0].poll() is None
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def read_until(process: "subprocess.Popen[str]", wanted: str) -> str:
    """The process's stderr up to a line with `wanted`."""
    lines = ""
    assert process.stderr is not None
    for line in process.stderr:
        lines += line
        if wanted in line:
            return lines
    raise AssertionError(f"no {wanted!r} in:\n{lines}")


OUT_OF_THE_WAY = """
import sys, torch_xla
from importlib import metadata
from accbench.pjrt import cuda
sys.modules["theirs"] = type(sys)("theirs")
sys.modules["theirs"].Plugin = type("Plugin", (), {})
theirs = metadata.EntryPoint("CUDA", "theirs:Plugin", "torch_xla.plugins")
ours = metadata.EntryPoint("CUDA", "accbench.pjrt.cuda:plugin", "torch_xla.plugins")
for found in ([ours], [ours, theirs], [theirs, ours]):
    cuda.entry_points = lambda found=found, **kwargs: found
    print(type(cuda.plugin()).__module__, cuda.is_another_installed())
"""


def test_another_packages_plugin_is_left_in_place() -> None:
    process = start(OUT_OF_THE_WAY, PJRT_DEVICE="CPU")
    stdout, stderr = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, stderr
    assert [line.split() for line in stdout.splitlines()] == [
        ["accbench.pjrt.cuda", "False"], ["__main__", "True"], ["__main__", "True"],
    ]  # fmt: skip
