"""`accbench preflight`, with the compiler that GPUs get: real programs for absent GPUs."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest

from accbench.pjrt import gpu, nvidia
from accbench.preflight.tracing import programs, xla
from tests.conftest import HANG_S, ROOT, run, wait_until

pytest.importorskip("torch_xla")
pytestmark = [pytest.mark.xla, pytest.mark.usefixtures("as_users_have_it")]

# ResNet-50's step as it was when it was last looked at: what grows by more than 2 % is found. A
# change for the better belongs in here, and in a file of docs/results/.
GOLDEN = {"bytes": 89.316e9, "operations": 596, "launches": 597, "peak_bytes": 10.21 * 2**30}
JAX_GOLDEN = {"bytes": 2.643e09, "launches": 402, "peak_bytes": 3.776e08}
SCHEMA = json.loads((ROOT / "accbench/report/preflight.schema.json").read_text())


def start(*flags: object, **env: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "accbench", "preflight", *map(str, flags)],
        cwd=ROOT, env={**os.environ, **env}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def end(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=HANG_S)
    return process.returncode, out, err


def told(*flags: object) -> tuple[int, str, str]:
    """Of one that nobody sends signals to."""
    done = run("accbench", "preflight", *flags, script="-m")
    return done.returncode, done.stdout, done.stderr


def result_of(*flags: object) -> dict[str, Any]:
    status, out, err = told("--format=json", *flags)
    assert status == 0, err
    assert err == ""
    found: dict[str, Any] = json.loads(out)
    jsonschema.validate(found, SCHEMA)
    return found


def test_the_compiler_is_there() -> None:
    """The other tests need the packages that `make test` installs."""
    assert nvidia.find_plugin() is not None
    assert nvidia.toolkit(nvidia.find_plugin()) is not None


@pytest.fixture(scope="module")
def resnet50(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("preflight") / "kept"
    return result_of("--gpu=h100", "--batch_size=256", f"--keep={folder}"), folder


def test_resnet50_moves_no_more_than_it_did(resnet50) -> None:
    found, _ = resnet50
    step, kinds = found["step"], found["kinds"]
    now = {
        "bytes": step["bytes"],
        "operations": sum(kind["launches"] for kind in kinds),
        "launches": step["launches"],
        "peak_bytes": found["memory"]["peak_bytes"],
    }
    for name, value in now.items():
        assert 0.9 * GOLDEN[name] < value < 1.02 * GOLDEN[name], f"{name}: {now}"
    assert now["launches"] <= 600
    # 53 convolutions forward, their weights' and, but for the first, their inputs' gradients
    (convolutions,) = (kind for kind in kinds if kind["kind"] == "convolution")
    assert convolutions["launches"] == 53 + 53 + 52
    # 4.09 GFLOP an image for one product of each, 256 images
    assert convolutions["flops"] == pytest.approx(3 * 256 * 2 * 4.09e9, rel=0.01)


def test_resnet50_is_in_half_precision_on_the_device_and_in_one_layout(resnet50) -> None:
    found, _ = resnet50
    assert found["host_transfers"] == []
    assert list(found["layouts"]) == ["b01f_o01i->b01f"]  # channels last, all of them
    assert {row["element_type"] for row in found["large_tensors"]} <= {"f16", "u8"}
    assert found["reduction"] is None


def test_kernels_are_named_by_the_module_they_come_from(resnet50) -> None:
    sources = [row["source"] for row in resnet50[0]["dearest"]]
    assert any(source.startswith("net/layer1/") for source in sources)
    assert any(source.startswith("backward.net.layer1.") for source in sources)


def test_the_bound_is_below_eagers_and_follows_from_the_bytes(resnet50) -> None:
    found, _ = resnet50
    step, target = found["step"], gpu.load("h100")
    assert (
        step["bytes"] / target.bytes_per_s
        < step["bound_s"]
        < 1.2 * step["bytes"] / (target.bytes_per_s)
    )
    assert step["samples_per_s_at_most"] == pytest.approx(256 / step["bound_s"])
    assert 1.2 < found["eager"]["bytes"] / step["bytes"] < 1.6
    assert found["eager"]["flops"] == pytest.approx(step["flops"], rel=0.02)
    assert found["cost"]["compile_s"] > 0
    assert found["cost"]["compiler_peak_bytes"] > 100e6


def test_what_xla_made_is_kept_and_can_be_laid_beside_another(resnet50) -> None:
    found, folder = resnet50
    assert json.loads((folder / "preflight.json").read_text()) == found
    assert next(folder.glob("compiled/*.ptx")).read_text().count(".target sm_90") == 1
    assert (folder / "executable.bin").stat().st_size > 10**5
    status, out, _ = told("--compare", folder, folder / "preflight.json", "--format=md")
    assert status == 0
    assert "resnet50" in out
    status, _, err = told("--gpu=h100", f"--keep={folder}")
    assert (status, err.count("\n")) == (2, 1)
    assert "not empty" in err


def test_eight_gpus_reduce_beside_the_backward_pass() -> None:
    flags = ("--model=resnet10", "--image_size=64", "--batch_size=16", "--gpu=a100_80")
    found = result_of(*flags, "--nproc_per_node=8", "--xla.bucket_mib=3")
    assert found["num_gpus"] == 8
    reduction = found["reduction"]
    # every gradient, the loss scale's none: 5.4 million parameters of four bytes
    assert reduction["bytes"] == pytest.approx(4 * found["model"]["num_parameters"], rel=1e-4)
    assert len(reduction["all_reduces"]) > 4
    assert reduction["started_before_last_product"] > 0.9


def test_all_ranks_have_one_program(tmp_path) -> None:
    """Byte for byte, of dropout, mixup and a loss scale: or they would wait for each other."""
    flags = ("--model=tests.nets:dropping", "--image_size=32", "--batch_size=8", "--engine=xla",
             "--device=cuda", "--amp_level=O1", "--amp_dtype=float16", "--data=synthetic",
             "--nproc_per_node=2", "--mixup=0.2")  # fmt: skip
    found = []
    for rank in (0, 1):
        folder = tmp_path / str(rank)
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-c",
             "import sys; from accbench.preflight.tracing import xla; "
             f"sys.exit(xla.main(sys.argv[1:], rank={rank}))", str(folder), *flags],
            cwd=ROOT, env={**os.environ, **xla.environment(folder, 2)}, text=True,
            capture_output=True, timeout=HANG_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found.append(programs.read(folder))
    assert found[0][0] == "hlo"
    assert len(found[0][1]) > 10_000
    assert found[0] == found[1]


def test_optimizers_policies_and_accumulation_compile_for_a_gpu_as_well() -> None:
    flags = ("--model=tests.nets:tiny", "--image_size=64", "--batch_size=16", "--gpu=t4")
    more = ("--optimizer=sgd", "--accumulate=2", "--clip_norm=1", "--ema_decay=0.9")
    found = result_of(*flags, *more, "--on_nan=skip", "--label_smoothing=0.1", "--mixup=0.2")
    assert found["host_transfers"] == []
    assert found["memory"]["fits"]
    assert found["eager"] is not None


@pytest.mark.parametrize("num_gpus", [1, 8])
def test_a_step_that_is_recorded_compiles_for_gpus_as_well(num_gpus) -> None:
    flags = ("--model=tests.nets:tiny", "--batch_size=8", "--image_size=32", "--xla.replay=on")
    found = result_of(*flags, f"--nproc_per_node={num_gpus}")
    assert found["host_transfers"] == []
    assert found["step"]["launches"] > 20
    assert (found["reduction"] is not None) == (num_gpus > 1)


@pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed")
def test_jaxs_step_compiles_for_eight_gpus() -> None:
    """What it took is as golden as ResNet-50's above."""
    # Smaller batches fit into the GPU's cache, where XLA writes float32 rather than compute twice.
    flags = ("--model=resnet18", "--image_size=64", "--batch_size=256", "--amp_dtype=float16")
    found = result_of("--engine=jax", *flags, "--gpu=h100", "--nproc_per_node=8")
    step, reduction = found["step"], found["reduction"]
    now = {"bytes": step["bytes"], "launches": step["launches"],
           "peak_bytes": found["memory"]["peak_bytes"]}  # fmt: skip
    for name, value in JAX_GOLDEN.items():
        assert 0.9 * value < now[name] < 1.02 * value, f"{name}: {now}"
    assert found["host_transfers"] == []
    assert {row["element_type"] for row in found["large_tensors"]} <= {"f16", "pred", "u8"}
    (convolutions,) = (kind for kind in found["kinds"] if kind["kind"] == "convolution")
    assert convolutions["launches"] == 20 + 20 + 19
    assert reduction["bytes"] == pytest.approx(4 * found["model"]["num_parameters"], rel=1e-4)
    assert reduction["started_before_last_product"] > 0.8
    assert found["eager"] is not None


@pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed")
def test_a_state_in_parts_takes_an_eighth_of_each_gpu() -> None:
    flags = ("--model=tests.nets:wide", "--image_size=64", "--batch_size=64")
    found = result_of("--engine=jax", "--jax.shard", *flags, "--gpu=h100", "--nproc_per_node=8")
    num_bytes, reduction = 4 * found["model"]["num_parameters"], found["reduction"]
    images = 64 * 3 * 64 * 64 * 4
    assert found["memory"]["arguments_bytes"] < images + 3 * 0.2 * num_bytes
    assert reduction["bytes"] == pytest.approx(num_bytes, rel=0.01)
    assert 0.9 * num_bytes < 8 * reduction["gathered_bytes"] < num_bytes
    assert any("scatter" in row["name"] for row in reduction["all_reduces"])


def small_gpu(folder: Path, memory_bytes: int) -> Path:
    text = gpu._FOLDER.joinpath("h100.yaml").read_text()
    path = folder / "small.yaml"
    path.write_text(text.replace("memory_bytes: 84942979072", f"memory_bytes: {memory_bytes}"))
    return path


def test_a_batch_that_does_not_fit_and_the_largest_that_does(tmp_path) -> None:
    flags = ("--model=tests.nets:tiny", "--image_size=64", "--workers=0")
    target = small_gpu(tmp_path, 4_000_000)
    more = ("--batch_size=24", f"--gpu={target}", "--find_batch", "--format=json")
    status, out, err = told(*flags, *more)
    assert status == 1, err
    found = json.loads(out)
    assert not found["memory"]["fits"]
    search = found["batch_search"]
    tried = {batch: (need, fits) for batch, need, fits in search["tried"]}
    assert 8 <= search["largest"] < 24
    need, fits = tried[search["largest"]]
    assert fits
    assert need <= 4_000_000
    assert not tried[search["largest"] + 8][1]  # the next one was tried as well


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--gpu=h101",), "there are: a100_40"),
        (("--engine=ddp",), "cannot compile whole steps"),
        (("--gpu=t4", "--amp_dtype=bfloat16"), "has no bfloat16"),
        (("--device=cpu",), "'cpu' for argument"),
        (("--model=nope",), "unknown model"),
        (("--compare", "/nope", "/nope"), "--compare /nope"),
        (("--data=imagefolder:/nope",), "/nope"),
    ],
)
def test_a_wrong_request_is_one_line(flags, message) -> None:
    status, out, err = told(*flags)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert message in err


def test_a_step_that_asks_the_host_is_told_with_its_place_in_the_model() -> None:
    status, _, err = told("--model=tests.nets:asks_the_host", "--batch_size=8")
    assert status == 2
    assert "a value is needed on the host" in err
    assert "tests/nets/" in err
    assert "if logits.max() > 100" in err
    assert err.count("\n") == 1


def test_a_backward_pass_that_fails_is_told_with_its_place_in_the_model() -> None:
    status, _, err = told("--model=tests.nets:raising", "--batch_size=8")
    assert (status, err.count("\n")) == (2, 1), err
    assert "ValueError: no way back from here" in err
    assert "tests/nets/" in err


@pytest.mark.parametrize(
    ("plugin", "message"),
    [("/nope.so", "which is not at /nope.so"), ("libc", "is not a PJRT plug-in")],
)
def test_a_missing_or_wrong_plugin_is_one_line(plugin, message) -> None:
    if plugin == "libc":
        maps = psutil.Process().memory_maps()
        plugin = next(m.path for m in maps if "libc.so" in m.path or "libc-" in m.path)
    flags = ("--model=tests.nets:tiny", "--batch_size=8", "--image_size=32")
    status, _, err = end(start(*flags, ACCBENCH_CUDA_PLUGIN=plugin))
    assert (status, err.count("\n")) == (2, 1), err
    assert message in err


def test_a_flag_that_xla_does_not_know_ends_its_process_and_is_one_line() -> None:
    """XLA aborts on it."""
    flags = ("--model=tests.nets:tiny", "--batch_size=8", "--image_size=32")
    status, _, err = told(*flags, "--xla.flags=xla_gpu_no_such_flag=1")
    assert (status, err.count("\n")) == (2, 1), err
    assert "xla_gpu_no_such_flag" in err


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.soak), signal.SIGKILL]
)
def test_whoever_ends_it_ends_the_compiler_too(number, tmp_path) -> None:
    process = start("--model=resnet18", "--batch_size=8", f"--keep={tmp_path / 'kept'}")
    child: list[psutil.Process] = []

    def compiling() -> bool:
        assert process.poll() is None
        for found in psutil.Process(process.pid).children():
            with contextlib.suppress(psutil.Error):  # it has just ended
                if "accbench.preflight.compiling" in " ".join(found.cmdline()):
                    child.append(found)
        return bool(child)

    wait_until(compiling)
    process.send_signal(number)
    status, _, err = end(process)
    assert status == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert "Traceback" not in err
    wait_until(lambda: not child[0].is_running())
