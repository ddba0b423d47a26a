"""torch.compile: what it leaves to eager PyTorch is counted, and its faults are mended."""

import json
import shutil

import pytest
import torch

from accbench import config
from accbench.engines.inductor import Engine
from tests.conftest import TINY, end_of, python, run

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("inductor") / "cache"


def test_processes_that_compile_for_triton_are_started_for_gpus_alone():
    """Each imports torch, while the worker wants the cores for its first step."""
    on_cpu, on_gpu = (
        Engine.worker_env(config.parse(["--engine=inductor", f"--device={device}"]), 0)
        for device in ("cpu", "cuda")
    )
    assert on_cpu["TORCH_WARM_POOL"] == "0"
    assert "TORCH_WARM_POOL" not in on_gpu


def test_what_is_left_to_eager_pytorch_is_counted(tmp_path, cache, monkeypatch):
    elsewhere = tmp_path / "of the environment"  # which the flag replaces
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(elsewhere))
    result = run(
        *TINY, "--model=tests.nets:not_compiled", "--engine=inductor", "--data=synthetic",
        f"--inductor.cache_dir={cache}", f"--output_dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert end_of(tmp_path / "run").num_fallbacks >= 1
    assert any(cache.rglob("*.so"))
    assert not elsewhere.exists()


def found_by(module, *arguments):
    done = python("-m", f"tests.engines.{module}", *arguments)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))
    return json.loads(line)


# accbench changes nothing of torch 2.15, which has none of these; `make soak` tells if one is back.
OF_OLDER_TORCH = [pytest.mark.soak] if torch.__version__ >= (2, 15) else []


@pytest.mark.parametrize("faults", [pytest.param("kernels", marks=OF_OLDER_TORCH)])
def test_faults_of_inductor_are_mended(cache, faults):
    """What was read before it was written in place, and a buffer of one value for 320."""
    found = found_by("inductor_faults", cache, faults)
    assert len(found["kept"]) == 8 * 320
    # of dropout of 0.25
    assert all(value == 0 or value == pytest.approx(4 / 3, rel=1e-3) for value in found["kept"])
    assert 0.15 < found["kept"].count(0.0) / len(found["kept"]) < 0.35
    assert len(found["gradients"]) == len(found["outputs"]) == 4
    assert max(found["gradients"]) < 1e-5
    assert max(found["outputs"]) < 1e-5


def test_the_loss_of_labels_that_end_early_is_eagers(cache):
    found = found_by("inductor_faults", cache, "labels")
    assert len(found["outputs"]) == 1
    assert max(found["outputs"]) < 1e-5


def test_a_cache_that_bfloat16_has_filled_gives_float16_its_own_graphs(tmp_path):
    """AOTAutograd's key knows that autocast is on, and not its type."""
    losses = found_by("cached_types", tmp_path)
    assert losses["float16-shared"] == losses["float16-fresh"] != losses["bfloat16-shared"]
