"""Engine jax compared with eager and float64: steps, state in torch and JAX, two workers."""

import json

import pytest
import torch

from accbench.recording import records
from tests.conftest import TINY, end_of, of_kind, python, run, two_ranks
from tests.engines.jax import steps

pytest.importorskip("jax")

pytestmark = pytest.mark.usefixtures("as_users_have_it")

STEPS = "tests/scripts/steps.py"


def found_by(*names: str) -> dict:
    done = python("-m", "tests.engines.jax.steps", *names, NPROC="1")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found() -> dict:
    return found_by(*(name for name in steps.TRIED if name != "resnet"))


# `tests.comparing.test_numerics` has smaller nets beside float64, and sees smaller errors.
@pytest.mark.soak
def test_a_resnet_is_as_near_to_float64_as_eager():
    of = found_by("resnet")["resnet"]
    assert of["jax"] < 1e-3
    assert of["jax"] < 3 * of["ddp"]


@pytest.mark.parametrize("name", ["recipe", "sgd", "shapes", "keeps"])
def test_weights_and_the_optimizers_state_are_eagers(found, name):
    """Accumulation, clipping, averages, groups without decay; momentum; changing rates; tensors
    that are no buffers, buffers that are replaced, a batch that is written to, int64."""
    of = found[name]
    assert of["weights"] < 1e-4
    assert of["optimizer"] < 1e-4
    assert of["losses"][0] == pytest.approx(of["losses"][1], rel=1e-5)
    assert of["applied"] == [6, 6]
    assert of["moved"] > 0.05


def test_a_schedule_compiles_nothing_and_another_shape_does(found):
    assert found["recipe"]["compiles"] == 1
    assert found["shapes"]["compiles"] == 6


def test_autocast_is_in_the_graph(found):
    of = found["bfloat16"]
    assert of["losses"][0] == pytest.approx(of["losses"][1], rel=2e-3)
    assert of["losses"][0] != pytest.approx(of["losses"][1], rel=1e-7)
    assert of["weights"] < 0.2


def test_attention_that_cudnn_does_not_compile_is_xlas(found):
    of = found["without cudnn"]
    (told,) = of["told"]
    assert told.startswith("without cuDNN's attention, as the step does not compile with it: ")
    assert of["losses"][0] == pytest.approx(of["losses"][1], rel=2e-2)
    assert of["applied"] == [6, 6]


def test_a_step_that_overflows_is_left_out_and_halves_the_scale(found):
    of = found["overflow"]
    assert of["scaler"][0] == of["scaler"][1] == {"scale": 1024.0, "growth_tracker": 0.0}
    assert of["applied"] == [0, 0]
    assert of["optimizer"] == 0
    assert of["buffers moved"] > 1  # as eager has it


def test_gradients_that_are_not_finite_leave_all_as_it_was(found):
    of = found["skip"]
    assert (of["moved"], of["buffers moved"], of["applied"]) == (0, 0, [0, 0])


def test_training_goes_on_bit_for_bit_from_a_state_that_was_read(found):
    of = found["resumed"]
    unbroken, read_on_the_way, resumed = of["losses"]
    assert unbroken == read_on_the_way == resumed
    assert of["same"] == [True, True]
    assert of["same optimizer"]


def test_torchs_tensors_are_read_and_written_between_steps(found):
    of = found["written"]
    assert of["read"] < 1e-4
    assert of["weights"] < 1e-4
    assert of["scores"][0] == pytest.approx(of["scores"][1], rel=1e-5)


def test_parameters_in_sixteen_bits_stay_so(found):
    assert found["halved"]["dtypes"] == ["torch.bfloat16"]
    assert found["halved"]["away"] < 0.02  # an update is 0.1


def test_a_buffer_that_evaluation_replaces_is_the_one_that_is_trained(found):
    assert found["halved"]["seen"] == 6


FLAGS = (*TINY, "--device=cpu", "--data=synthetic", "--seed=3")


@pytest.fixture(scope="module")
def of_two(tmp_path_factory) -> dict:
    """Engine, or jax with its state sharded -> what either rank came to."""
    out, found = tmp_path_factory.mktemp("two"), {}
    sharded = ("--engine=jax", "--dp_shard=auto", "--jax.evaluation=compiled")
    ways = {"ddp": ("--engine=ddp",), "jax": ("--engine=jax",), "sharded": sharded}
    for name, way in ways.items():
        (out / name).mkdir()
        flags = (*FLAGS, "--model=tests.nets:merging", "--clip_norm=0.5", *way)
        done = two_ranks(STEPS, out / name, *flags)
        assert done.returncode == 0, done.stderr
        found[name] = [torch.load(out / name / f"rank{r}.pt", weights_only=True) for r in range(2)]
    return found


def test_two_workers_average_as_ddp_does(of_two):
    for own, expected in zip(of_two["jax"], of_two["ddp"], strict=True):
        assert own["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert own["applied_steps"] == 6
        for name, tensor in expected["state"].items():
            assert torch.allclose(own["state"][name].float(), tensor.float(), atol=1e-4), name
    first, second = (rank["state"] for rank in of_two["jax"])
    for name in first:
        of_batches = ".running_" in name
        assert torch.equal(first[name], second[name]) != of_batches, name


def test_sharded_over_workers_the_state_is_the_same_and_half_as_large(of_two):
    for sharded, replicated in zip(of_two["sharded"], of_two["jax"], strict=True):
        assert sharded["losses"] == pytest.approx(replicated["losses"], rel=1e-6)
        assert sharded["applied_steps"] == 6
        for name, tensor in replicated["state"].items():
            assert torch.allclose(sharded["state"][name].float(), tensor.float(), atol=1e-6), name
        assert sharded["device_bytes"] < 0.55 * replicated["device_bytes"]
        # Of a batch that the other rank does not have, compiled and by torch, with the weights that
        # eval() has written.
        assert sharded["score"] == pytest.approx(replicated["score"], rel=1e-5)


def test_evaluation_compiled_is_torchs(images, tmp_path):
    """Of weights and of their average, over two workers whose last batches are short."""
    flags = (*TINY, "--device=cpu", f"--data=imagefolder:{images}", "--engine=jax", "--epochs=2",
             "--nproc_per_node=2", "--batch_size=5", "--ema_decay=0.5", "--save_interval=0",
             "--amp_level=O1", "--max_steps=8")  # fmt: skip
    found = {}
    for how in ("compiled", "eager"):
        result = run(*flags, f"--jax.evaluation={how}", f"--output_dir={tmp_path / how}")
        assert result.returncode == 0, result.stderr
        assert "evaluation is torch's" not in result.stdout
        found[how] = of_kind(tmp_path / how, records.EvalRecord)
    assert [e.averaged for e in found["compiled"]] == [False, True] * 2
    for own, torchs in zip(found["compiled"], found["eager"], strict=True):
        assert own.loss == pytest.approx(torchs.loss, rel=1e-3)  # in bfloat16
        assert (own.top5, own.num_samples) == (torchs.top5, 12)
        # Two logits that are equal to bfloat16's rounding may change places, in one sample here.
        assert own.top1 == pytest.approx(torchs.top1, abs=1.01 / 12)
    compiled, eager = (end_of(tmp_path / how) for how in ("compiled", "eager"))
    assert compiled.num_compiles == eager.num_compiles + 1


@pytest.mark.parametrize("state", ["no-shard", "shard"])
def test_a_reduction_that_does_nothing_is_refused(state, tmp_path):
    done = two_ranks(STEPS, tmp_path, "--break_reduction", *FLAGS, "--engine=jax", f"--jax.{state}")
    assert done.returncode != 0
    assert "gradients are not averaged over the 2 ranks (in_graph)" in done.stderr
    assert not list(tmp_path.iterdir())
