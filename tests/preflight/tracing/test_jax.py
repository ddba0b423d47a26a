"""A step of engine jax, traced for GPUs that are not here."""

import pytest

from tests.preflight import running

pytest.importorskip("jax")
pytest.importorskip("torch_xla")
pytestmark = [pytest.mark.xla, pytest.mark.usefixtures("as_users_have_it")]

# As the golden figures of ResNet-50 in test_command.py.
JAX_GOLDEN = {"bytes": 2.643e09, "launches": 402, "peak_bytes": 3.776e08}


def test_jaxs_step_compiles_for_eight_gpus() -> None:
    # Smaller batches fit into the GPU's cache, where XLA writes float32 rather than compute twice.
    flags = ("--model=resnet18", "--image_size=64", "--batch_size=256", "--amp_dtype=float16")
    found = running.result_of("--engine=jax", *flags, "--gpu=h100", "--nproc_per_node=8")
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


def test_a_state_in_parts_takes_an_eighth_of_each_gpu() -> None:
    flags = ("--model=tests.nets:wide", "--image_size=64", "--batch_size=64")
    found = running.result_of(
        "--engine=jax", "--jax.shard", *flags, "--gpu=h100", "--nproc_per_node=8"
    )
    num_bytes, reduction = 4 * found["model"]["num_parameters"], found["reduction"]
    images = 64 * 3 * 64 * 64 * 4
    assert found["memory"]["arguments_bytes"] < images + 3 * 0.2 * num_bytes
    assert reduction["bytes"] == pytest.approx(num_bytes, rel=0.01)
    assert 0.9 * num_bytes < 8 * reduction["gathered_bytes"] < num_bytes
    assert any("scatter" in row["name"] for row in reduction["all_reduces"])
