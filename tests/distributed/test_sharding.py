"""Sharded training is unsharded training: four processes, every way to shard."""

import json

import pytest

from accbench.data import mock_images
from accbench.recording import records
from tests.conftest import ROOT, TINY, end_of, of_kind, run, several_ranks
from tests.scripts import sharded_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("sharded")
    done = several_ranks(4, ROOT / "tests" / "scripts" / "sharded_ranks.py", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("case", sharded_ranks.CASES)
def test_updates_are_those_of_unsharded_training(found, case):
    of = found[case]
    assert of["losses"] < 1e-6
    assert of["updates"] < (1e-4 if "adamw" in case else 1e-5)
    sharded_applied, applied = of["applied"]
    assert sharded_applied == applied == (4 if "overflow" in case or "skipped" in case else 5)
    assert of["scale"] == ([32768.0] * 2 if "overflow" in case else [None] * 2)
    assert of["rereads"] == [True, True]


@pytest.mark.parametrize("case", sharded_ranks.CASES)
def test_a_rank_keeps_its_share_of_the_optimizers_state(found, case):
    sharded, whole = found[case]["bytes"]
    assert sharded < whole / (2 if "2 x 2" in case else 4) * 1.05


@pytest.mark.parametrize(("flags", "line"), [
    (("--dp_shard=3",), "4 workers are no multiple of --dp_shard 3; use auto or one of 1, 2, 4"),
    (("--dp_shard=half",), "--dp_shard must be auto or a number of workers, not 'half'"),
    (("--zero=2",), "--zero 2 shards nothing without --dp_shard auto"),
    (("--dp_shard=auto", "--engine=xla"), "--dp_shard auto: engine xla keeps the whole model on "
     "each worker; use --engine ddp or jax"),
    (("--dp_shard=auto", "--engine=inductor"),
     "--dp_shard auto: engine inductor does not shard; use --engine ddp"),
    (("--dp_shard=2", "--engine=jax"), "--dp_shard 2: engine jax shards over all 4 workers; use "
     "--dp_shard auto, or --engine ddp"),
    (("--dp_shard=auto", "--zero=1", "--engine=jax"), "--zero 1: engine jax shards parameters and "
     "optimizer state alike; use --zero 3, or --engine ddp"),
    (("--dp_shard=auto", "--ddp.find_unused_parameters"), "--ddp.find_unused_parameters is not "
     "for --dp_shard, which needs every parameter's gradient on each worker; freeze those that "
     "are unused (requires_grad = False)"),
])  # fmt: skip
def test_what_cannot_be_is_refused_in_a_line(tmp_path, flags, line):
    done = run(
        *TINY, "--data=synthetic", "--nproc_per_node=4", f"--output_dir={tmp_path / 'run'}", *flags
    )
    assert done.returncode == 2
    assert done.stderr.strip().endswith(f": {line}")


def test_workers_with_different_numbers_of_batches_evaluate_together(tmp_path):
    """Of 9 images to validate one worker has 5, in two batches, and the other 4, in one."""
    plan = mock_images.MockImagePlan(num_classes=3, num_train=8, num_val=3)
    mock_images.make(tmp_path / "images", plan)
    evaluations = []
    for name, flags in {"ddp": (), "sharded": ("--dp_shard=auto",)}.items():
        done = run(*TINY, f"--data=imagefolder:{tmp_path / 'images'}", "--nproc_per_node=2",
                   "--ema_decay=0.5", "--save_interval=0", "--ddp.no-channels_last",
                   f"--output_dir={tmp_path / name}", *flags)  # fmt: skip
        assert done.returncode == 0, done.stderr
        evaluations.append(of_kind(tmp_path / name, records.EvalRecord))
    for expected, of in zip(*evaluations, strict=True):
        assert of.loss == pytest.approx(expected.loss, rel=1e-5)
        assert (of.num_samples, of.averaged) == (9, expected.averaged)
    assert {of.averaged for of in evaluations[1]} == {False, True}
    header = of_kind(tmp_path / "sharded", records.RunRecord)[0]
    assert header.mesh == {"pp": 1, "replicate": 1, "shard": 2, "cp": 1, "tp": 1}
    kept = [end_of(tmp_path / name).state_bytes for name in ("ddp", "sharded")]
    assert kept[1] < 0.6 * kept[0]
