"""Sharded training is unsharded training: four processes, every way to shard."""

import itertools
import json
import random
from pathlib import Path

import pytest
import torch

from accbench import config, launchers
from accbench.comparing import jobs, plan
from accbench.config import TaskConfig
from accbench.data import mock_images
from accbench.distributed import mesh
from accbench.errors import RequestError
from accbench.recording import records
from accbench.training import checkpoint_file
from tests.conftest import ROOT, TINY, end_of, of_kind, processes_of, run, several_ranks
from tests.engine_params import NEEDS_JAX, NEEDS_XLA
from tests.scripts import sharded_ranks
from tests.scripts.sharded_ranks import RING

# Position embeddings, norms and biases of rows are not cut, and in small models they are a part.
SHARES = {
    "cp sgd": 1, "cp adamw": 0.25, "cp 2 x tp 2": 0.52,
    "ignored labels": 1, "ignored labels accumulated": 1, "ignored labels 2 x 2 zero 3": 0.26,
    "ignored labels cp": 1, "ignored labels pp": 0.52,
    "cp 4 ring sgd": 1, "cp ring adamw": 0.25, "cp 4 ring ignored labels": 1,
    "cp 2 ring x tp 2": 0.52, "ends tp 2 x 2 adamw": 0.26,
    "tp sgd": 0.52, "tp adamw": 0.7, "tp overflow": 0.52, "tp accumulated": 0.35,
    "tp bert": 0.6, "tp vit": 0.7, "tp 2 x 2 zero 3": 0.26, "tp 2 x 2 zero 1": 0.35,
    "tp 2 x 2 adamw": 0.35, "inductor tp 2 x 2": 0.26, "offload optimizer": 1,
    "offload all tp 2 x 2": 0.35, "partial fc sgd": 0.76, "partial fc uneven adamw": 0.76,
    "pp 4 sgd": 0.28, "pp 2 tied adamw": 0.54, "pp 2 interleaved": 0.5, "pp 4 batchnorm": 0.27,
    "pp 2 x 2 zero 1": 0.27, "sequence sgd": 0.52, "sequence adamw": 0.52,
    "sequence tied adamw": 0.7, "sequence bert": 0.6, "sequence vit": 0.7,
    "sequence 2 x 2 zero 3": 0.26, "sequence 2 x 2 zero 1": 0.35, "sequence cp 2 x tp 2": 0.52,
    "sequence dropout": 1, "inductor sequence 2 x 2": 0.26,
}  # fmt: skip


def run_ranks(folder, kind: str) -> dict:
    done = several_ranks(4, "-m", "tests.scripts.sharded_ranks", folder, kind)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    return run_ranks(tmp_path_factory.mktemp("sharded"), "CASES")


@pytest.mark.parametrize("case", sharded_ranks.CASES)
def test_updates_are_those_of_unsharded_training(found, case):
    check_case(found[case], case, sharded_ranks.CASES[case])


@pytest.mark.soak
def test_compiled_updates_are_those_of_unsharded_training(tmp_path):
    found = run_ranks(tmp_path, "SOAKED")
    for case, asked in sharded_ranks.SOAKED.items():
        check_case(found[case], case, asked)


@pytest.mark.soak
def test_ways_to_shard_that_repeat_others_are_as_right(tmp_path):
    found = run_ranks(tmp_path, "REPEATED")
    for case, asked in sharded_ranks.REPEATED.items():
        check_case(found[case], case, asked)
        if "jax" not in case:
            check_share(found[case], case)
        if "ends" in case:
            check_ends(found[case], case)
    check_sequence_parallelism(found, "tp adamw", "sequence tied adamw")


def check_case(of: dict, case: str, asked: sharded_ranks.Case) -> None:
    flags = {*asked[0], *asked[1]}
    if case == "tp overflow":  # products that are summed in parts are rounded otherwise in float16
        assert of["losses"] < 1e-4
        assert of["updates"] < 0.05
    else:
        assert of["losses"] < 1e-6
        assert of["updates"] < (1e-4 if "--optimizer=adamw" in flags else 1e-5)
    sharded_applied, applied = of["applied"]
    assert sharded_applied == applied == (4 if "overflow" in case or "skipped" in case else 5)
    assert of["scale"] == ([32768.0] * 2 if "overflow" in case else [None] * 2)
    assert of["buffers"] == []
    assert of["rereads"] == of["starts"] == of["names"] == [True, True]
    is_built_in_shards = "--dp_shard" in str(flags) and not {"--zero=1", "--engine=jax"} & flags
    # torchvision's draws by values.
    is_built_in_shards |= "--pp=" in str(flags) and "vit" not in case
    assert of["deferred"] == [is_built_in_shards, False]


@pytest.mark.parametrize("case", [case for case in sharded_ranks.CASES if "jax" not in case])
def test_a_rank_keeps_its_share_of_the_optimizers_state(found, case):
    check_share(found[case], case)


def check_share(of: dict, case: str) -> None:
    sharded, whole = of["bytes"]
    assert sharded < whole * SHARES.get(case, 0.5 if "2 x 2" in case else 0.25) * 1.05


@pytest.mark.parametrize("case", [case for case in sharded_ranks.CASES if "ends" in case])
def test_a_large_embedding_and_head_are_gathered_by_themselves(found, case):
    check_ends(found[case], case)


def check_ends(of: dict, case: str) -> None:
    sharded, whole = of["score"]
    assert sharded == pytest.approx(whole, rel=1e-5)
    between_passes, parameters = of["whole"]
    outside_of_blocks = [name for name in parameters if not name.startswith("blocks.")]
    expected = {"ends zero 2": parameters, "ends tied": outside_of_blocks}
    assert between_passes == expected.get(case, ["norm.weight", "norm.bias"])


def test_sequence_parallelism_sums_in_parts_and_keeps_less(found):
    check_sequence_parallelism(found, "tp sgd", "sequence sgd")


def check_sequence_parallelism(found: dict, layers: str, sequence: str) -> None:
    of_layers, of_sequence = found[layers]["passes"], found[sequence]["passes"]
    assert "reduce_scatter_tensor" not in of_layers
    # Of two layers, each with attention and an MLP, forward and backward. What is left is the
    # embedding's, and that of the head's inputs.
    assert of_sequence["reduce_scatter_tensor"] == 2 * 2 * 2
    assert of_sequence["all_reduce"] == 2
    # Likewise, with the logits', and before and behind all layers.
    assert of_sequence["all_gather_into_tensor"] == 2 * 2 * 2 + 3
    # At least one activation a layer less, of 4 samples, 16 tokens and width 64 in float32.
    less = of_layers["saved_bytes"] - of_sequence["saved_bytes"]
    assert less > 2 * 4 * 16 * 64 * 4


@pytest.mark.parametrize(("flags", "line"), [
    (("--sequence_parallel",), "--sequence_parallel cuts what lies between the layers that --tp "
     "cuts; add --tp 2, or leave it out"),
    (("--sequence_parallel", "--tp=2", "--model=llama_tiny", "--seq_len=31"), "--sequence_parallel:"
     " --seq_len 31 is no multiple of --tp 2; use --seq_len 30, or leave --sequence_parallel out"),
    (("--sequence_parallel", "--tp=2", "--cp=2", "--model=llama_tiny", "--seq_len=30"),
     "--sequence_parallel: --seq_len 30 is no multiple of --cp 2 times --tp 2; use --seq_len 28, "
     "or leave --sequence_parallel out"),
    (("--sequence_parallel", "--tp=2", "--model=vit_s_16", "--image_size=224"),
     "--sequence_parallel: sequences of 197 are no multiple of --tp 2; leave --sequence_parallel "
     "out"),
    (("--dp_shard=3",), "4 workers are no multiple of --dp_shard 3; use auto or one of 1, 2, 4"),
    (("--dp_shard=half",), "--dp_shard must be auto or a number of workers, not 'half'"),
    (("--zero=2",), "--zero 2 shards nothing without --dp_shard auto"),
    (("--tp=3",), "4 workers are no multiple of --tp 3; use one of 1, 2, 4"),
    (("--tp=2", "--dp_shard=4"), "2 workers after --tp 2 are no multiple of --dp_shard 4; use "
     "auto or one of 1, 2"),
    (("--tp=2", "--cp=2", "--dp_shard=auto"), "--dp_shard auto shards nothing: 1 of 4 workers is "
     "left after --tp 2 and --cp 2; leave --dp_shard out, or start more workers"),
    (("--cp_attention=ring",), "--cp_attention ring shares nothing without --cp 2"),
    pytest.param(
        ("--dp_shard=auto", "--engine=xla"), "--dp_shard auto: engine xla keeps the whole model on "
        "each worker; use --engine ddp, inductor or jax", marks=[pytest.mark.xla, NEEDS_XLA]),
    (("--dp_shard=2", "--engine=jax"), "--dp_shard 2: engine jax shards over all 4 workers; use "
     "--dp_shard auto, or --engine ddp"),
    (("--dp_shard=auto", "--zero=1", "--engine=jax"), "--zero 1: engine jax shards parameters and "
     "optimizer state alike; use --zero 3, or --engine ddp"),
    (("--dp_shard=auto", "--ddp.find_unused_parameters"), "--ddp.find_unused_parameters is not "
     "for --dp_shard, which needs every parameter's gradient on each worker; freeze those that "
     "are unused (requires_grad = False)"),
    (("--offload=all",), "--offload all copies the shards of --dp_shard to the device as they are "
     "needed; add --dp_shard auto, or use --offload optimizer"),
    (("--offload=all", "--dp_shard=auto", "--zero=2"), "--offload all: --zero 2 keeps whole "
     "parameters on the device; use --zero 3, or --offload optimizer"),
    (("--offload=optimizer", "--engine=jax"), "--offload optimizer: engine jax keeps all of its "
     "state on the device; use --engine ddp or inductor"),
    (("--model=arcface_r18", "--arcface.sample_rate=0.1", "--engine=jax"), "--arcface.sample_rate: "
     "engine jax keeps all classes on each worker; use --engine ddp or inductor, or leave it out"),
    (("--model=arcface_r18", "--arcface.sample_rate=0.1", "--dp_shard=auto"),
     "--arcface.sample_rate shards the classes over all workers, and nothing else; leave "
     "--dp_shard, --tp, --cp and --pp out"),
])  # fmt: skip
def test_flags_that_do_not_go_together_are_refused(flags, line):
    task = config.parse([*TINY, "--data=synthetic", "--nproc_per_node=4", "--device=cpu", *flags])
    with pytest.raises(RequestError) as caught:
        launchers.resolve(task)
    assert str(caught.value) == line


@pytest.mark.parametrize(("flags", "line"), sharded_ranks.REFUSED.items())
def test_what_a_model_cannot_is_refused(found, flags, line):
    assert found["refused"][" ".join(flags)] == line


@pytest.mark.parametrize(("flags", "line"), [
    # By the launcher, and by the workers, who build the model.
    (("--dp_shard=3",), "4 workers are no multiple of --dp_shard 3; use auto or one of 1, 2, 4"),
    (("--tp=2",), "--model tests.nets:tiny has no plan for --tp 2; use --dp_shard, or give the "
     "network a tensor_parallel_plan (docs/parallel.md)"),
])  # fmt: skip
def test_what_cannot_be_is_refused_in_a_line(tmp_path, flags, line):
    done = run(
        *TINY, "--data=synthetic", "--nproc_per_node=4", f"--output_dir={tmp_path / 'run'}", *flags
    )
    assert done.returncode == 2
    (told,) = done.stderr.splitlines()
    assert told.partition("; logs in")[0].endswith(f": {line}")


@pytest.mark.parametrize("flags", [{"offload": "all"}, {"nnodes": "1:2"}])
def test_one_worker_is_a_shard_where_it_is_copied_or_others_may_come(flags):
    task = TaskConfig(nproc_per_node=4, tp=4, dp_shard="auto", **flags)
    assert mesh.of_task(task, 4).sizes == {"pp": 1, "replicate": 1, "shard": 1, "cp": 1, "tp": 4}


def test_workers_with_different_numbers_of_batches_evaluate_together(tmp_path):
    """Of 9 images to validate one worker has 5, in two batches, and the other 4, in one."""
    images = mock_images.MockImagePlan(num_classes=3, num_train=8, num_val=3)
    mock_images.make(tmp_path / "images", images)
    evaluations = []
    ways = {"ddp": (), "sharded": ("--dp_shard=auto",), "offloaded": ("--offload=optimizer",),
            "zero1": ("--dp_shard=auto", "--zero=1")}  # fmt: skip
    for name, flags in ways.items():
        done = run(*TINY, f"--data=imagefolder:{tmp_path / 'images'}", "--nproc_per_node=2",
                   "--ema_decay=0.5", "--save_interval=0", "--ddp.no-channels_last",
                   f"--output_dir={tmp_path / name}", *flags)  # fmt: skip
        assert done.returncode == 0, done.stderr
        evaluations.append(of_kind(tmp_path / name, records.EvalRecord))
    for expected, *others in zip(*evaluations, strict=True):
        for of in others:
            assert of.loss == pytest.approx(expected.loss, rel=1e-5)
            assert (of.num_samples, of.averaged) == (9, expected.averaged)
    assert {of.averaged for of in evaluations[1]} == {False, True}
    header = of_kind(tmp_path / "sharded", records.RunRecord)[0]
    assert header.mesh == {"pp": 1, "replicate": 1, "shard": 2, "cp": 1, "tp": 1}
    ends = {name: end_of(tmp_path / name) for name in ways}
    assert ends["sharded"].state_bytes < 0.6 * ends["ddp"].state_bytes
    assert [end.offloaded_bytes for end in ends.values()] == [0, 0, ends["ddp"].state_bytes, 0]
    # AdamW's moments, and the parameters twice.
    on_device = ends["offloaded"].state_bytes - ends["offloaded"].offloaded_bytes
    assert on_device == pytest.approx(ends["ddp"].state_bytes / 4, rel=0.2)


LANGUAGE = (*TINY, "--model=tests.distributed.decoders:decoder", "--seq_len=16",
            "--warmup_steps=1", "--log_interval=1", "--optimizer=sgd", "--lr=0.1",
            "--ema_decay=0.9", "--eval_interval=0")  # fmt: skip
# Eight samples a step in all of them. Between them every kind of state is written, and read.
LEGS = (
    ("--nproc_per_node=1", "--batch_size=8"),
    ("--nproc_per_node=2", "--batch_size=4", "--dp_shard=auto", "--zero=1", "--offload=optimizer"),
    ("--nproc_per_node=4", "--batch_size=2", "--dp_shard=2", "--offload=all"),
    ("--nproc_per_node=4", "--batch_size=4", "--tp=2", "--dp_shard=auto", "--engine=jax"),
    ("--nproc_per_node=4", "--batch_size=4", "--tp=2", "--dp_shard=auto"),
    ("--nproc_per_node=2", "--batch_size=8", "--pp=2", "--accumulate=2"),
    ("--nproc_per_node=2", "--batch_size=4"),
)
MORE_LEGS = (
    ("--nproc_per_node=4", "--batch_size=2", "--dp_shard=auto"),
    ("--nproc_per_node=2", "--batch_size=4", "--dp_shard=auto", "--zero=1", "--offload=optimizer"),
    ("--nproc_per_node=1", "--batch_size=8"),
    ("--nproc_per_node=4", "--batch_size=2", "--dp_shard=2", "--offload=all"),
    ("--nproc_per_node=2", "--batch_size=4", "--dp_shard=auto", "--engine=jax"),
    ("--nproc_per_node=2", "--batch_size=4", "--dp_shard=auto", "--zero=2"),
    ("--nproc_per_node=2", "--batch_size=4"),
    ("--nproc_per_node=4", "--batch_size=4", "--tp=2", "--dp_shard=auto"),
    ("--nproc_per_node=2", "--batch_size=8", "--tp=2", "--sequence_parallel"),
    ("--nproc_per_node=4", "--batch_size=4", "--tp=2", "--dp_shard=auto", "--engine=jax"),
    ("--nproc_per_node=4", "--batch_size=4", "--cp=2", "--dp_shard=auto"),
    ("--nproc_per_node=1", "--batch_size=8", "--offload=optimizer"),
    ("--nproc_per_node=4", "--batch_size=4", "--pp=2", "--accumulate=2"),
    ("--nproc_per_node=4", "--batch_size=2", "--dp_shard=auto"),
)


@NEEDS_JAX
def test_a_run_goes_on_in_other_ways_to_shard(tmp_path):
    check_goes_on(tmp_path, LEGS)


@NEEDS_JAX
@pytest.mark.soak
def test_a_run_of_llama_goes_on_in_every_other_way_to_shard(tmp_path):
    """4 -> 2 -> 1 -> 2 x 2 -> jax -> 2 -> tp -> 4 workers."""
    check_goes_on(tmp_path, MORE_LEGS, "--model=llama_tiny")


def check_goes_on(tmp_path: Path, legs: tuple[tuple[str, ...], ...], *more: str) -> None:
    """Train one run, two steps in each way, and the same one at once."""
    words = random.Random(0).choices(("shard", "gather", "rank", "mesh", "stage"), k=2000)
    (tmp_path / "text").write_text(" ".join(words))
    # At 0.1 rounding alone grows to 1e-5 in these steps, without any sharding too.
    common = (*LANGUAGE, *more, f"--data=tokens:{tmp_path / 'text'}", "--lr=0.01")
    for number, flags in enumerate(legs, start=1):
        done = run(*common, *flags, f"--max_steps={2 * number}", "--resume=auto",
                   f"--output_dir={tmp_path / 'legs'}")  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    unbroken = run(*common, "--batch_size=8", f"--max_steps={2 * len(legs)}",
                   f"--output_dir={tmp_path / 'whole'}")  # fmt: skip
    assert unbroken.returncode == 0, unbroken.stderr
    losses = [[w.loss for w in of_kind(tmp_path / name, records.WindowRecord)]
              for name in ("legs", "whole")]  # fmt: skip
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    last = f"step-{2 * len(legs):09}"
    states = [checkpoint_file.read(tmp_path / name / "checkpoints" / last).state
              for name in ("legs", "whole")]  # fmt: skip
    for kind in ("model", "optimizer"):
        of, expected = getattr(states[0], kind), getattr(states[1], kind)
        assert of.keys() == expected.keys()
    assert {key for state in states[0].optimizer.values() for key in state} == {
        "step", "momentum_buffer", "average"
    }  # fmt: skip
    for name, tensor in states[1].model.items():
        assert (states[0].model[name] - tensor).norm() < 1e-5 * tensor.norm(), name
    for name, expected in states[1].optimizer.items():
        for kind in ("momentum_buffer", "average"):
            of = states[0].optimizer[name][kind]
            assert (of - expected[kind]).norm() < 1e-5 * expected[kind].norm(), (name, kind)


def test_classes_are_shared_out_over_any_number_of_workers(tmp_path):
    """PartialFC with all classes, of 7 over 4, 1 and 2 workers, beside the whole head on one."""
    images = mock_images.MockImagePlan(num_classes=7, num_train=4, num_val=1)
    mock_images.make(tmp_path / "images", images)
    common = (*TINY, f"--data=imagefolder:{tmp_path / 'images'}", "--image_size=16",
              "--optimizer=sgd", "--lr=0.01", "--momentum=0.5", "--ema_decay=0.5",
              "--warmup_steps=1", "--log_interval=1", "--max_steps=100")  # fmt: skip
    for number, workers in enumerate((4, 1, 2), start=1):
        done = run(*common, "--model=tests.nets:PartialFace", f"--nproc_per_node={workers}",
                   f"--batch_size={8 // workers}", f"--epochs={number}", "--resume=auto",
                   f"--output_dir={tmp_path / 'shared'}")  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    done = run(*common, "--model=tests.nets:TinyFace", "--batch_size=8", "--epochs=3",
               f"--output_dir={tmp_path / 'whole'}")  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses, evaluations, states = [], [], []
    for name in ("shared", "whole"):
        losses.append([w.loss for w in of_kind(tmp_path / name, records.WindowRecord)])
        evaluations.append(of_kind(tmp_path / name, records.EvalRecord))
        last = max((tmp_path / name / "checkpoints").iterdir())
        states.append(checkpoint_file.read(last).state)
    assert len(losses[1]) == 9
    # Logits are cosines times 64, and rounding grows likewise.
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    for of, expected in zip(*evaluations, strict=True):
        assert of.loss == pytest.approx(expected.loss, rel=1e-4)
        assert (of.top1, of.top5, of.num_samples) == (expected.top1, expected.top5, 7)
    for name, tensor in states[1].model.items():
        assert (states[0].model[name] - tensor).norm() < 1e-4 * tensor.norm(), name
    assert states[0].optimizer["net.classes"]["momentum_buffer"].shape == (7, 512)


def samples_and_losses(folder: Path, *flags: str) -> tuple[list[int], list[float]]:
    (folder / "text").write_text((ROOT / "docs" / "architecture.md").read_text()[:700])
    done = run(*LANGUAGE, f"--data=tokens:{folder / 'text'}", "--epochs=1", "--max_steps=99",
               "--batch_size=4", "--eval_interval=1", "--save_interval=0",
               f"--output_dir={folder / 'run'}", *flags)  # fmt: skip
    assert done.returncode == 0, done.stderr
    evaluations = of_kind(folder / "run", records.EvalRecord)
    assert evaluations
    logged = (*of_kind(folder / "run", records.WindowRecord), *evaluations)
    num_samples = [end_of(folder / "run").num_samples, *(r.num_samples for r in logged)]
    return num_samples, [record.loss for record in logged]


@pytest.fixture(scope="module")
def of_one_worker(tmp_path_factory) -> tuple[list[int], list[float]]:
    return samples_and_losses(tmp_path_factory.mktemp("alone"))


# Ranks that share a batch are counted alike whatever they share of it.
@pytest.mark.parametrize("shared", [
    pytest.param(("--tp=2",), marks=pytest.mark.soak), ("--tp=2", "--sequence_parallel"),
    pytest.param(("--cp=2",), marks=pytest.mark.soak), ("--cp=2", RING),
    ("--pp=2", "--accumulate=2"),
])  # fmt: skip
def test_samples_that_workers_share_count_once(tmp_path, of_one_worker, shared):
    num_samples, losses = of_one_worker
    assert len(num_samples) > 3
    of_shared, losses_of_shared = samples_and_losses(tmp_path, "--nproc_per_node=2", *shared)
    assert of_shared == num_samples
    assert losses_of_shared == pytest.approx(losses, rel=1e-5)


def test_a_step_logs_the_mean_over_all_of_its_labels(tmp_path):
    """Of a text whose batches have different numbers of labels that count."""
    losses = {}
    (tmp_path / "text").write_text((ROOT / "docs" / "architecture.md").read_text()[:900])
    ways = {"alone": ("--batch_size=4",), "in two": ("--batch_size=4", "--accumulate=2"),
            "in four": ("--batch_size=2", "--nproc_per_node=2", "--accumulate=2")}  # fmt: skip
    for name, flags in ways.items():
        done = run(*LANGUAGE, "--model=tests.nets:later_letters", f"--data=tokens:{tmp_path}/text",
                   "--epochs=1", "--eval_interval=1", "--save_interval=0", *flags,
                   f"--output_dir={tmp_path / name}")  # fmt: skip
        assert done.returncode == 0, done.stderr
        logged = (*of_kind(tmp_path / name, records.WindowRecord),
                  *of_kind(tmp_path / name, records.EvalRecord))  # fmt: skip
        losses[name] = [record.loss for record in logged]
    assert len(losses["alone"]) > 5
    for parts in ("in two", "in four"):
        assert losses[parts] == pytest.approx(losses["alone"], rel=1e-6)


@pytest.mark.parametrize("sharded", [("--zero=1",), ("--zero=3",)])
def test_a_checkpoint_that_cannot_be_written_ends_all_workers(tmp_path, sharded):
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "checkpoints").rmdir()
    (run_dir / "checkpoints").write_text("in the way")
    done = run(*LANGUAGE, "--data=synthetic", "--nproc_per_node=2", "--dp_shard=auto", *sharded,
               f"--output_dir={run_dir}", "--timeout_s=60")  # fmt: skip
    assert done.returncode != 0
    assert "cannot write a checkpoint" in done.stderr


KILLED_TEXT = ("--model=tests.distributed.decoders:killed_on_rank1", "--seq_len=16")


@pytest.mark.parametrize("flags", [
    ("--model=tests.nets:killed_on_rank1", "--dp_shard=auto"),
    ("--model=tests.nets:killed_on_rank1", "--pp=2", "--accumulate=2"),
    (*KILLED_TEXT, "--tp=2", "--sequence_parallel"),
    (*KILLED_TEXT, "--cp=2", RING),
])  # fmt: skip
def test_a_killed_rank_ends_the_others(tmp_path, flags):
    done = run(*TINY, "--data=synthetic", "--nproc_per_node=2", *flags,
               f"--output_dir={tmp_path / 'run'}")  # fmt: skip
    assert done.returncode == 1
    assert "rank 1 was killed by SIGKILL" in done.stderr
    assert end_of(tmp_path / "run").status == "error"
    assert not processes_of(tmp_path / "run")


def test_a_comparison_has_sharded_rows(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    flags = [*TINY, "--data=synthetic", "--nproc_per_node=2"]
    engines = "--engines=ddp,ddp:dp_shard=auto:zero=1,ddp:dp_shard=3"
    asked = plan.parse([*flags, engines], "accbench compare").plan
    tasks = [row.task for row in asked.rows]
    assert [task and (task["dp_shard"], task["zero"]) for task in tasks] == [
        (None, None), ("auto", 1), None
    ]  # fmt: skip
    assert "2 workers are no multiple of --dp_shard 3" in asked.rows[2].reason


def every_job(asked, folder) -> list[jobs.Job]:
    return [*itertools.chain.from_iterable(jobs.in_order(asked, folder))]


def test_rows_whose_workers_share_a_batch_have_the_same_global_batch(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    flags = [*TINY, "--data=synthetic", "--nproc_per_node=4", "--batch_size=3"]
    engines = "--engines=ddp:tp=2:dp_shard=auto,ddp,ddp:cp=2:tp=2"
    asked = plan.parse([*flags, engines], "accbench compare").plan
    assert [row.task and row.task["batch_size"] for row in asked.rows] == [6, 3, 12]
    numerics = [job for job in every_job(asked, tmp_path) if job.label.startswith("numerics")]
    references = {job.folder: job for job in numerics if job.kind == "reference"}
    made = [(job.argument, job.task["batch_size"]) for job in references.values()]
    assert made == [("4:reuse", 3), ("2x2:reuse", 6), ("1x4:reuse", 12)]
    checks = {job.row.name: job for job in numerics if job.kind == "check"}
    for row in (asked.rows[0], asked.rows[2]):
        beside = references[Path(checks[row.name].argument)]
        assert beside.task["batch_size"] == row.task["batch_size"]
    (floor, _) = [job for job in numerics if job.kind == "floor"]
    assert (floor.task["batch_size"], floor.task["tp"], floor.task["dp_shard"]) == (3, 1, None)
    with pytest.raises(RequestError, match="in its rows alone: --engines ddp,ddp:tp=2"):
        plan.parse([*flags, "--engines=ddp,jax", "--tp=2"], "accbench compare")
    with pytest.raises(RequestError, match="in its rows alone: .*:sequence_parallel=on"):
        plan.parse([*flags, "--engines=ddp,jax", "--sequence_parallel"], "accbench compare")


def test_rows_share_sequences(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    flags = [*TINY, "--data=synthetic", "--nproc_per_node=2", "--model=llama_tiny", "--seq_len=16"]
    engines = "--engines=ddp,ddp:tp=2:sequence_parallel=on,ddp:sequence_parallel=true"
    asked = plan.parse([*flags, engines], "accbench compare").plan
    assert [row.task and row.task["sequence_parallel"] for row in asked.rows] == [False, True, None]
    assert asked.rows[2].reason.endswith("add --tp 2, or leave it out")
    numerics = [job for job in every_job(asked, tmp_path) if job.label.startswith("numerics")]
    plain = [job for job in numerics if job.kind in ("reference", "floor")]
    assert not any(job.task["sequence_parallel"] for job in plain)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "offload", [("--offload=optimizer",), ("--offload=all", "--dp_shard=auto")]
)
def test_a_gpu_trains_the_same_with_its_state_on_the_host(tmp_path, offload):
    losses, ends = [], []
    for name, flags in {"device": (), "host": offload}.items():
        done = run(*LANGUAGE, "--device=cuda", "--data=synthetic", "--nproc_per_node=1",
                   "--clip_norm=0.5", f"--output_dir={tmp_path / name}", *flags)  # fmt: skip
        assert done.returncode == 0, done.stderr
        losses.append([w.loss for w in of_kind(tmp_path / name, records.WindowRecord)])
        ends.append(end_of(tmp_path / name))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert ends[1].offloaded_bytes == ends[0].state_bytes
