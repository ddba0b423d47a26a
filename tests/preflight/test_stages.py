"""A pipeline's stages, counted for GPUs that are not here: memory, bytes sent, waiting."""

from importlib.util import find_spec

import pytest

from accbench import config, resolving
from accbench.pjrt import gpu
from accbench.preflight import stages
from accbench.preflight.communication import Links
from accbench.report import preflight_report
from tests.preflight import running

needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)
H100 = gpu.load("h100")
STAGED = ("--model=tests.nets:staged", "--image_size=16", "--amp_level=O0", "--optimizer=sgd")
PIPELINE = ("--engine=ddp", "--data=synthetic", "--pp=4", "--accumulate=8", "--batch_size=16")
# A micro-batch's two images of six channels and 8 x 8 positions in float32.
HIDDEN_BYTES = 2 * 6 * 8 * 8 * 4


def counted(*flags: str, num_nodes: int = 1, gpus_per_node: int = 4) -> dict:
    nodes = (f"--nnodes={num_nodes}", f"--nproc_per_node={gpus_per_node}")
    meeting = ("--rdzv_endpoint=localhost",) if num_nodes > 1 else ()
    task = config.parse([*STAGED, *PIPELINE, *nodes, *meeting, *flags])
    links = Links(num_nodes, gpus_per_node, 450e9, 50e9)
    return stages.count(resolving.apply_defaults(task, "cuda"), H100, links)


def test_a_stage_keeps_its_parameters_and_what_its_blocks_save():
    """Of a block's convolution, BatchNorm and GELU each saves what it reads."""
    ranks = counted()["ranks"]
    block = 4 * (6 * 6 * 9 + 6 + 2 * 6)
    assert [rank["parameter_bytes"] for rank in ranks[1:3]] == [block] * 2
    assert ranks[0]["parameter_bytes"] == block + 4 * (6 * 3 * 9 + 6 + 2 * 6)
    for rank in ranks[1:3]:
        assert 3 * HIDDEN_BYTES <= rank["saved_bytes"] < 3.05 * HIDDEN_BYTES
        assert rank["optimizer_bytes"] == pytest.approx(block, abs=64)  # the momentum
    for rank in ranks:
        assert rank["peak_bytes"] == (
            2 * rank["parameter_bytes"] + rank["optimizer_bytes"]
            + rank["in_flight"] * rank["saved_bytes"]
        )  # fmt: skip


def test_schedules_keep_as_many_microbatches_as_they_have_begun():
    found = counted()
    assert [rank["in_flight"] for rank in found["ranks"]] == [4, 3, 2, 1]
    assert found["bubble"] == pytest.approx(3 / 11)
    found = counted("--pp_schedule=gpipe")
    assert [rank["in_flight"] for rank in found["ranks"]] == [8] * 4
    found = counted("--pp_schedule=interleaved", "--pp=2", gpus_per_node=2)
    assert [rank["stages"] for rank in found["ranks"]] == [[0, 2], [1, 3]]
    assert [rank["in_flight"] for rank in found["ranks"]] == [5, 3]
    assert found["bubble"] == pytest.approx(1 / 17)
    assert found["num_stages"] == 4


def test_all_stages_take_as_long_as_they_compute_and_wait():
    found = counted()
    each = [rank["microbatch_s"] for rank in found["ranks"]]
    update_s = max(rank["update_s"] for rank in found["ranks"])
    assert found["bound_s"] == pytest.approx(8 * max(each) + sum(each) - max(each) + update_s)
    assert found["samples_per_s_at_most"] == pytest.approx(16 / found["bound_s"])


def test_activations_go_to_the_next_stage_and_gradients_back():
    """Two nodes of four, of which the first has the stages 1 and 2, each twice."""
    ranks = counted(num_nodes=2)["ranks"]
    each = 8 * HIDDEN_BYTES
    assert [rank["passed_in_node_bytes"] for rank in ranks] == [each] * 4
    assert [rank["passed_network_bytes"] for rank in ranks] == [0, each, each, 0]
    # Of two GPUs with the same stage, each sends all of its gradients once.
    assert [rank["reduced_in_node_bytes"] for rank in ranks] == [
        rank["parameter_bytes"] for rank in ranks
    ]
    halves = counted("--dp_shard=2", "--zero=1", num_nodes=2)["ranks"]
    for whole, half in zip(ranks, halves, strict=True):
        assert half["optimizer_bytes"] == pytest.approx(whole["optimizer_bytes"] / 2, abs=64)


@needs_transformers
def test_the_command_tells_of_a_language_models_stages(tmp_path):
    flags = ("--model=llama_tiny", "--engine=ddp", "--pp=2", "--accumulate=2", "--batch_size=4",
             "--nproc_per_node=2", "--amp_dtype=bfloat16", "--seq_len=32")  # fmt: skip
    found = running.result_of(*flags, f"--keep={tmp_path / 'kept'}")
    first, last = found["ranks"]
    # Embedding and head are as large, and norms are few.
    assert first["parameter_bytes"] == pytest.approx(last["parameter_bytes"], rel=0.01)
    logits = 2 * 32 * 512 * 4
    assert last["saved_bytes"] > logits > 0
    assert found["memory"]["fits"]
    text = preflight_report.render(found, "md")
    assert "32 tokens a sample" in text
    assert "a GPU waits 33.3 % of the step" in text
    status, _, err = running.completed("--compare", tmp_path / "kept", tmp_path / "kept")
    assert (status, err.count("\n")) == (2, 1)
    assert "no result of a compiled step" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--engine=jax",), "counts the stages of engine ddp; use --engine ddp"),
        (("--tp=2", "--nproc_per_node=8"), "counts stages of whole layers; leave --tp and --cp"),
        (("--find_batch",), "--pp 4: preflight searches among steps without stages"),
        (("--checkpoint_modules=Sequential",), "does not count recomputed activations"),
        (("--accumulate=2",), "--accumulate 2: --pp 4 works on as many micro-batches at once"),
        (("--nproc_per_node=6",), "6 workers are no multiple of --pp 4"),
        (("--pp=8", "--nproc_per_node=8"), "has 4 blocks, and each stage needs one"),
    ],
)
def test_what_is_not_counted_is_refused_in_a_line(flags, message):
    status, out, err = running.completed(*STAGED, *PIPELINE, "--nproc_per_node=4", *flags)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert message in err
