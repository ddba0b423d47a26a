"""`accbench doctor`: what is here, and trying it."""

import getpass
import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from accbench.data import shared_memory
from accbench.machine import doctor, self_test
from accbench.pjrt import nvidia
from accbench.system import extras
from tests import containers
from tests.conftest import ROOT, python
from tests.engine_params import HAS_JAX


@pytest.fixture
def _forked_runs(monkeypatch) -> None:
    """Fork the self-test's runs, each of which would import torch twice."""

    def run(command: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        return python(*command[1:])

    there = SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(self_test, "subprocess", there)


def test_json_names_every_engine_and_nothing_private() -> None:
    done = python("-m", "accbench", "doctor", "--format=json", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["cores"] >= 1
    assert facts["memory_bytes"] > 0
    assert facts["free_port"] is True
    assert facts["versions"]["torch"]
    assert ("jax" in facts["versions"]) == HAS_JAX
    usable = {(line["engine"], line["device"]): line["reason"] for line in facts["engines"]}
    assert usable["ddp", "cpu"] is None
    assert usable["ddp", "cuda"] is not None
    assert usable["xla", "cuda"] is not None
    for private in (socket.gethostname(), str(ROOT), os.path.expanduser("~"), getpass.getuser()):
        assert f'"{private}' not in done.stdout
        assert len(private) < 5 or private not in done.stdout


def test_the_table_gives_the_reason_in_words() -> None:
    facts = {
        "versions": {"torch": "2.8.0"}, "system": "Linux", "cpu": "A CPU", "cores": 2,
        "memory_bytes": 2**33, "free_disk_bytes": 2**34, "free_port": True,
        "gpus": [{"name": "NVIDIA X", "memory_bytes": 2**37, "compute_capability": "9.0"}],
        "gpu_problem": None, "driver": "570.86", "driver_cuda": "12.8", "torch_cuda": "12.8",
        "plugin": "jax-cuda12-pjrt 0.6.2", "cudnn": "9.10", "nccl": "2.27", "ptxas": None,
        "engines": [{"engine": "xla", "device": "tpu", "reason": "there is [no] TPU here",
                     "torch": None}],
        "self_test": [{"engine": "ddp", "device": "cpu", "workers": 2, "error": None,
                       "wall_s": 1.5}],
    }  # fmt: skip
    command = extras.install_command("s3")
    without_plugin = {**facts, "engines": [{"engine": "xla", "device": "cpu", "reason": command}]}
    told = doctor.render(without_plugin, "json")
    assert json.loads(told)["engines"][0]["reason"].endswith("pip install -e 'CLONE[s3]'")
    assert str(ROOT) not in told
    assert sys.executable not in told
    text = doctor.render(facts, "table")
    assert "NVIDIA X, 128 GiB, compute capability 9.0" in text
    assert "there is [no] TPU here" in text
    assert [line.split() for line in text.splitlines() if "ddp" in line] == [
        ["ddp", "cpu", "2", "ok", "1.5"]
    ]
    assert all(line == line.rstrip() for line in text.splitlines())


def test_what_a_container_lacks_is_told(monkeypatch, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path / "none")
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: containers.UID)
    monkeypatch.setattr(doctor, "check_engines", lambda: [])  # asks another environment's Python
    told = " ".join(doctor.render(doctor.examine(), "table").split())
    assert "has no name" in told
    assert "in the temporary folder, for the user's cannot be written: set XDG_CACHE_HOME" in told
    assert "shared memory none: use --workers 0" in told


@pytest.mark.usefixtures("_forked_runs")
@pytest.mark.parametrize("engine", ["ddp", pytest.param("jax", marks=pytest.mark.soak)])
def test_the_self_test_trains_alone_and_in_pairs(monkeypatch, engine) -> None:
    """By the engine of each kind: eager, and with collectives in the graph. All that can train
    here take their turn in `accbench doctor --self_test`."""
    usable = [one for one in doctor.check_engines() if one.engine == engine]
    monkeypatch.setattr(doctor, "check_engines", lambda: usable)
    results = self_test.run()
    assert [result for result in results if result["error"]] == []
    tested = {(result["engine"], result["device"], result["workers"]) for result in results}
    can_train = [one for one in usable if one.reason is None]
    assert engine != "ddp" or ("ddp", "cpu", 2) in tested
    assert tested == {(x.engine, x.device, n) for x in can_train for n in (1, 2)}


def test_two_workers_are_not_tried_on_one_gpu(monkeypatch) -> None:
    gpu = nvidia.NvidiaGpu("NVIDIA X", 2**36, "9.0")
    monkeypatch.setattr(nvidia, "driver", lambda: nvidia.Driver((gpu,), "13.0"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    usable = [doctor.EngineSupport(engine, "cuda", None) for engine in ("ddp", "inductor")]
    monkeypatch.setattr(doctor, "check_engines", lambda: usable)
    monkeypatch.setattr(self_test, "test_engine", lambda *asked: {"asked": asked[:3]})
    asked = [result["asked"] for result in self_test.run()]
    assert asked == [("ddp", "cuda", 1), ("inductor", "cuda", 1)]


@pytest.mark.parametrize(("cuda", "found"), [("12.8", "9.10"), ("13.0", "9.19"), (None, "9.19")])
def test_cudnn_is_that_of_torchs_cuda(monkeypatch, cuda, found) -> None:
    versions = {"nvidia-cudnn-cu12": "9.10", "nvidia-cudnn-cu13": "9.19"}
    monkeypatch.setattr(doctor, "_version", versions.get)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(doctor, "check_engines", lambda: [])  # asks another environment's Python
    assert doctor.examine()["cudnn"] == found


@pytest.mark.usefixtures("_forked_runs")
def test_a_worker_that_fails_is_told_of(monkeypatch) -> None:
    monkeypatch.setattr(self_test, "_FLAGS", (*self_test._FLAGS, "--lr=nan"))
    monkeypatch.setattr(doctor, "check_engines", lambda: [doctor.EngineSupport("ddp", "cpu", None)])
    alone, pair = self_test.run()
    assert "--lr" in alone["error"]
    assert "--lr" in pair["error"]
