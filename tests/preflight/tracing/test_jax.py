"""A step of engine jax, traced for GPUs that are not here."""

from functools import partial

import pytest

from accbench.pjrt import nvidia
from tests.preflight import running

pytest.importorskip("jax")
pytestmark = [
    pytest.mark.skipif(nvidia.find_plugin() is None, reason="needs a PJRT plugin for CUDA"),
    pytest.mark.usefixtures("as_users_have_it"),
]

# By plug-in, as the golden figures of ResNet-50 in test_command.py; docs/cuda.md has why they
# differ.
GOLDEN = {
    "jax-cuda12-pjrt": {"bytes": 2.643e9, "launches": 402, "peak_bytes": 3.776e8, "early": 0.95},
    "jax-cuda13-pjrt": {"bytes": 2.694e9, "launches": 500, "peak_bytes": 3.703e8, "early": 0.596},
}
result_of = partial(running.result_of, "--gpu=h100", by=running.FORKED)  # by default engine jax
result_of_llama = partial(
    running.result_of, "--engine=jax", "--gpu=h100", "--model=llama_tiny", "--seq_len=64",
    "--batch_size=4", "--amp_dtype=bfloat16", by=running.WITH_LLAMA,
)  # fmt: skip


def test_jaxs_step_compiles_for_eight_gpus() -> None:
    # Smaller batches fit into the GPU's cache, where XLA writes float32 rather than compute twice.
    flags = ("--model=resnet18", "--image_size=64", "--batch_size=256", "--amp_dtype=float16")
    found = result_of(*flags, "--nproc_per_node=8")
    assert found["engine"] == "jax"
    step, reduction = found["step"], found["reduction"]
    now = {"bytes": step["bytes"], "launches": step["launches"],
           "peak_bytes": found["memory"]["peak_bytes"],
           "early": reduction["started_before_last_product"]}  # fmt: skip
    golden = GOLDEN[str(nvidia.plugin_version()).split()[0]]
    assert now["early"] > 0.95 * golden["early"]
    for name in ("bytes", "launches", "peak_bytes"):
        assert 0.9 * golden[name] < now[name] < 1.02 * golden[name], f"{name}: {now}"
    assert found["host_transfers"] == []
    wide = [
        row for row in found["large_tensors"] if row["element_type"] not in ("f16", "pred", "u8")
    ]
    assert sum(row["bytes"] for row in wide) < 0.01 * step["bytes"]
    (convolutions,) = (kind for kind in found["kinds"] if kind["kind"] == "convolution")
    assert convolutions["launches"] == 20 + 20 + 19
    assert reduction["bytes"] == pytest.approx(4 * found["model"]["num_parameters"], rel=1e-4)
    assert found["eager"] is not None


@pytest.mark.soak  # the model that is traced without memory has its state in parts as well
def test_a_state_in_parts_takes_an_eighth_of_each_gpu() -> None:
    flags = ("--model=tests.nets:wide", "--image_size=64", "--batch_size=64")
    found = result_of("--jax.shard", *flags, "--nproc_per_node=8")
    num_bytes, reduction = 4 * found["model"]["num_parameters"], found["reduction"]
    images = 64 * 3 * 64 * 64 * 4
    assert found["memory"]["arguments_bytes"] < images + 3 * 0.2 * num_bytes
    assert reduction["bytes"] == pytest.approx(num_bytes, rel=0.01)
    assert 0.9 * num_bytes < 8 * reduction["gathered_bytes"] < num_bytes
    assert any("scatter" in row["name"] for row in reduction["all_reduces"])


def test_a_model_is_traced_without_memory_for_nodes_with_slices_and_shards() -> None:
    flags = ("--model=tests.nets:huge", "--image_size=64", "--batch_size=8")
    mesh = ("--nnodes=2", "--nproc_per_node=2", "--dp_shard=auto", "--tp=2")
    found = result_of(*flags, *mesh)
    part = 2**27  # weights after --tp
    assert (found["num_gpus"], found["num_nodes"]) == (4, 2)
    # Parameters and two moments, over the two that have other data, and images.
    state = 12 * part / 2
    assert state < found["memory"]["arguments_bytes"] < 1.05 * state
    # With memory it would be the whole model, its gradients' shapes and its moments.
    assert found["cost"]["tracer_peak_bytes"] < 3 * 2**30
    kinds = {row["kind"]: row for row in found["communication"]["kinds"]}
    for name in ("all-gather", "reduce-scatter"):  # between nodes, as neighbours share layers
        assert kinds[name]["network_bytes"] == pytest.approx(4 * part / 2, rel=0.02)
    assert kinds["all-reduce"]["in_node_bytes"] > 0
    assert 0 <= found["communication"]["overlapped"] <= 1
    assert found["communication"]["bound_s"] > found["step"]["bound_s"]


@pytest.mark.soak  # the ring's model has parts of sequences as well
def test_parts_of_sequences_exchange_heads_and_share_no_state() -> None:
    pytest.importorskip("transformers")
    found = result_of_llama("--nproc_per_node=2", "--cp=2")
    kinds = {row["kind"]: row for row in found["communication"]["kinds"]}
    # Two layers exchange queries, keys, values and results, forward and backward: four, two, two
    # and four heads of 16, of four sequences' 32 positions, in 16 bits. Half of it leaves the GPU.
    exchanged = 2 * 2 * (4 + 2 + 2 + 4) * 16 * 4 * 32 * 2
    assert kinds["all-to-all"]["in_node_bytes"] == pytest.approx(exchanged / 2, rel=0.01)
    assert kinds["all-reduce"]["in_node_bytes"] >= 4 * found["model"]["num_parameters"]
    assert found["memory"]["arguments_bytes"] > 12 * found["model"]["num_parameters"]


@pytest.mark.soak  # the ring's model and the one without memory have layers in parts as well
def test_parts_between_layers_are_sent_in_autocast_s_type() -> None:
    pytest.importorskip("transformers")
    found = result_of_llama("--nproc_per_node=2", "--tp=2", "--sequence_parallel")
    kinds = {row["kind"]: row for row in found["communication"]["kinds"]}
    # In each of two layers attention and MLP scatter their sums, and the gradients of what they
    # gathered: four sequences of 64 positions of 64, in 16 bits. Half of it leaves the GPU.
    assert kinds["reduce-scatter"]["in_node_bytes"] == 2 * 2 * 2 * (4 * 64 * 64 * 2) / 2


@pytest.mark.skipif(
    str(nvidia.plugin_version()).startswith("jax-cuda12-pjrt 0.6"),
    reason="XLA's compiler of this plug-in aborts, which preflight tells in a line",
)
def test_a_ring_passes_keys_and_values_on_and_their_gradients_back() -> None:
    pytest.importorskip("transformers")
    mesh = ("--nproc_per_node=8", "--cp=4", "--cp_attention=ring", "--tp=2")
    found = result_of_llama(*mesh)
    (permutes,) = (
        row for row in found["communication"]["kinds"] if row["kind"] == "collective-permute"
    )
    # Keys, and as many values, of each of two layers: one of two heads of 16, of four sequences' 16
    # positions. They go to the three other ranks in both passes, in 16 bits, and their gradients
    # there and home, in 32; but XLA rounds those of values before their last way, not behind it.
    keys = 1 * 16 * 4 * 16
    of_keys, of_values = 3 * 4 + 4, 3 * 4 + 2
    assert permutes["bytes"] == 2 * keys * (2 * (3 + 3) * 2 + of_keys + of_values)
    assert permutes["network_bytes"] == 0
