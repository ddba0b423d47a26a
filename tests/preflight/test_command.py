"""`accbench preflight`, with the compiler that GPUs get: real programs for absent GPUs."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from accbench.pjrt import gpu, nvidia
from tests.preflight import running

pytest.importorskip("torch_xla")
pytestmark = [pytest.mark.xla, pytest.mark.usefixtures("as_users_have_it")]

# Steps as they were when they were last looked at: what grows by more than 2 % is found. A change
# for the better belongs in here, and in a file of docs/results/. FLOP are of an image and one pass
# of the convolutions.
GOLDEN = {
    "resnet18": {
        "bytes": 18.850e9, "operations": 249, "launches": 249, "peak_bytes": 2.5643e9,
        "convolutions": 20, "flop": 2 * 1.80e9, "most_launches": 250, "bound_over_bytes": 1.25,
        "large": {"f16", "u8", "pred"},  # of which the last is a mask of one byte
    },
    "resnet50": {
        "bytes": 89.316e9, "operations": 596, "launches": 597, "peak_bytes": 10.21 * 2**30,
        "convolutions": 53, "flop": 2 * 4.09e9, "most_launches": 600, "bound_over_bytes": 1.2,
        "large": {"f16", "u8"},
    },
}  # fmt: skip


class Found(NamedTuple):
    model: str
    result: dict[str, Any]
    kept: Path


def test_the_compiler_is_there() -> None:
    """The other tests need the packages that `make test` installs."""
    assert nvidia.find_plugin() is not None
    assert nvidia.toolkit(nvidia.find_plugin()) is not None


@pytest.fixture(
    scope="module", params=["resnet18", pytest.param("resnet50", marks=pytest.mark.soak)]
)
def resnet(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Found:
    kept = tmp_path_factory.mktemp("preflight") / "kept"
    flags = ("--engine=xla", "--gpu=h100", "--batch_size=256")
    result = running.result_of(*flags, f"--model={request.param}", f"--keep={kept}")
    return Found(request.param, result, kept)


def test_a_step_moves_no_more_than_it_did(resnet) -> None:
    step, kinds, golden = resnet.result["step"], resnet.result["kinds"], GOLDEN[resnet.model]
    now = {
        "bytes": step["bytes"],
        "operations": sum(kind["launches"] for kind in kinds),
        "launches": step["launches"],
        "peak_bytes": resnet.result["memory"]["peak_bytes"],
    }
    for name, value in now.items():
        assert 0.9 * golden[name] < value < 1.02 * golden[name], f"{name}: {now}"
    assert now["launches"] <= golden["most_launches"]
    # Forward, their weights' and, but for the first, their inputs' gradients.
    (convolutions,) = (kind for kind in kinds if kind["kind"] == "convolution")
    assert convolutions["launches"] == 3 * golden["convolutions"] - 1
    assert convolutions["flops"] == pytest.approx(3 * 256 * golden["flop"], rel=0.01)


def test_a_step_is_in_half_precision_on_the_device_and_in_one_layout(resnet) -> None:
    found = resnet.result
    assert found["host_transfers"] == []
    assert list(found["layouts"]) == ["b01f_o01i->b01f"]  # channels last, all of them
    assert {row["element_type"] for row in found["large_tensors"]} <= GOLDEN[resnet.model]["large"]
    assert found["reduction"] is None


def test_kernels_are_named_by_the_module_they_come_from(resnet) -> None:
    sources = [row["source"] for row in resnet.result["dearest"]]
    assert any(source.startswith("net/layer1/") for source in sources)
    assert any(source.startswith("backward.net.layer1.") for source in sources)


def test_the_bound_is_below_eagers_and_follows_from_the_bytes(resnet) -> None:
    found, at_most = resnet.result, GOLDEN[resnet.model]["bound_over_bytes"]
    step, target = found["step"], gpu.load("h100")
    assert (
        step["bytes"] / target.bytes_per_s
        < step["bound_s"]
        < at_most * step["bytes"] / (target.bytes_per_s)
    )
    assert step["samples_per_s_at_most"] == pytest.approx(256 / step["bound_s"])
    assert 1.2 < found["eager"]["bytes"] / step["bytes"] < 1.6
    assert found["eager"]["flops"] == pytest.approx(step["flops"], rel=0.02)
    assert found["cost"]["compile_s"] > 0
    assert found["cost"]["compiler_peak_bytes"] > 100e6


def test_what_xla_made_is_kept_and_can_be_laid_beside_another(resnet) -> None:
    _, found, folder = resnet
    assert json.loads((folder / "preflight.json").read_text()) == found
    assert next(folder.glob("compiled/*.ptx")).read_text().count(".target sm_90") == 1
    assert (folder / "executable.bin").stat().st_size > 10**5
    status, out, _ = running.completed(
        "--compare", folder, folder / "preflight.json", "--format=md"
    )
    assert status == 0
    assert resnet.model in out
    status, _, err = running.completed("--gpu=h100", f"--keep={folder}")
    assert (status, err.count("\n")) == (2, 1)
    assert "not empty" in err


def test_optimizers_policies_and_accumulation_compile_for_a_gpu_as_well() -> None:
    flags = ("--model=tests.nets:tiny", "--image_size=64", "--batch_size=16", "--gpu=t4")
    more = ("--engine=xla", "--optimizer=sgd", "--accumulate=2", "--clip_norm=1", "--ema_decay=0.9")
    found = running.result_of(
        *flags, *more, "--on_nan=skip", "--label_smoothing=0.1", "--mixup=0.2"
    )
    assert found["host_transfers"] == []
    assert found["memory"]["fits"]
    assert found["eager"] is not None


def small_gpu(folder: Path, memory_bytes: int) -> Path:
    text = gpu._FOLDER.joinpath("h100.yaml").read_text()
    path = folder / "small.yaml"
    path.write_text(text.replace("memory_bytes: 84942979072", f"memory_bytes: {memory_bytes}"))
    return path


def test_a_batch_that_does_not_fit_and_the_largest_that_does(tmp_path) -> None:
    flags = ("--engine=xla", "--model=tests.nets:tiny", "--image_size=64", "--workers=0")
    target = small_gpu(tmp_path, 4_000_000)
    more = ("--batch_size=24", f"--gpu={target}", "--find_batch", "--format=json")
    status, out, err = running.completed(*flags, *more)
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
        (("--network_gbit_per_s=0",), "--network_gbit_per_s must be more than 0, not 0"),
        (("--find_mesh",), "--find_mesh needs several GPUs"),
        (("--mesh_tries=2",), "--mesh_tries 2 tries nothing without --find_mesh"),
        (("--find_mesh", "--nproc_per_node=2", "--engine=xla"), "engine xla has no meshes"),
    ],
)
def test_a_wrong_request_is_one_line(flags, message) -> None:
    status, out, err = running.completed(*flags)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert message in err
