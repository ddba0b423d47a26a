"""What ordinary loops do to ordinary models, which an engine has to follow."""

import importlib.util
import json

import pytest

from tests.conftest import python, two_ranks
from tests.engine_params import ALL, JAX, NEEDS_COMPILER, NEEDS_JAX, XLA

ENGINES = ALL
# Engine jax is engine inductor with other code for a graph: what finds graphs, and what averages
# gradients, is the same. So one of them is tried alone and one over workers; `make soak` has both.
SOAKED_INDUCTOR = pytest.param("inductor", marks=[NEEDS_COMPILER, pytest.mark.soak])
SOAKED_JAX = pytest.param("jax", marks=[NEEDS_JAX, pytest.mark.soak])


@pytest.mark.parametrize("engine", ["ddp", ENGINES[1], SOAKED_JAX, XLA])
def test_losses_and_weights_are_those_of_the_plain_loop(engine, tmp_path):
    done = python("-m", "tests.training.own_loop", engine, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "run-rank0.json").read_text())
    assert len(found["plain"]) == 8 + 2
    assert found["losses"] == pytest.approx(found["plain"], rel=1e-5)
    assert found["far"] < 1e-5


@pytest.mark.parametrize("engine", ["ddp", SOAKED_INDUCTOR, JAX, XLA])
def test_layers_unfrozen_on_the_way_are_averaged_over_workers(engine, tmp_path):
    done = two_ranks("-m", "tests.training.own_loop", engine, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"run-rank{n}.json").read_text()) for n in range(2)]
    of_both = [sum(losses) / 2 for losses in zip(*(one["losses"] for one in found), strict=True)]
    assert of_both == pytest.approx(found[0]["plain"], rel=1e-5)
    for one in found:
        assert one["far"] < 1e-5


@pytest.mark.parametrize("engine", ["ddp", SOAKED_INDUCTOR, JAX, XLA])
def test_gradients_are_averaged_whatever_of_the_model_a_loop_calls(engine, tmp_path):
    done = two_ranks("-m", "tests.training.own_workers", engine, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert float((tmp_path / f"run-rank{rank}.txt").read_text()) < 1e-5


def test_a_layer_that_nothing_uses_is_told_with_the_flag(tmp_path):
    done = two_ranks("-m", "tests.training.own_workers", "ddp", tmp_path / "run", "unused")
    assert done.returncode != 0
    assert "does not depend on 2 parameters" in done.stderr
    assert "--ddp.find_unused_parameters" in done.stderr


@pytest.mark.parametrize("engine", ENGINES[2:])
def test_gradients_of_norms_of_all_kinds_in_bfloat16_are_near_float64s(engine, tmp_path):
    done = python("-m", "tests.training.own_norms", engine, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))
    far = json.loads(line)
    assert len(far) == 11
    assert max(far.values()) < 0.15


@pytest.mark.xla
@pytest.mark.skipif(not importlib.util.find_spec("torch_xla"), reason="no torch_xla")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["sgd", "rmsprop", "nadam", "adadelta"])
def test_optimizers_go_on_from_a_plain_ones_state_and_plain_ones_from_theirs(name, when, tmp_path):
    done = python("-m", "tests.training.own_optimizer", name, when, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("{"))
    found = json.loads(line)
    assert len(found["plain"]) == 4
    assert found["losses"] == pytest.approx(found["plain"], rel=1e-5)
    assert found["far"] < 1e-6


# case -> (steps, samples)
COUNTED = {
    "by_sam": (6, 12), "by_lookahead": (6, 12), "two_optimizers": (12, 12), "of_halves": (6, 12),
    "zipped": (6, 24), "one_within_another": (5, 20),
}  # fmt: skip


def counted(engine, folder, *cases):
    done = python("-m", "tests.training.own_wrapped", engine, folder / "run", *cases)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "run.json").read_text())


def test_jax_trains_right_and_counts_what_is_not_a_call_and_a_step_each(tmp_path):
    """Two backward passes a step, and two calls of the model; the optimizers are torch's own."""
    if importlib.util.find_spec("jax") is None:  # importing it here would change the environment
        pytest.skip("JAX is not installed")
    cases = ("by_sam", "zipped")
    found = counted("jax", tmp_path, *cases)
    assert {case: (one["steps"], one["samples"]) for case, one in found.items()} == {
        case: COUNTED[case] for case in cases
    }
    assert max(one["far"] for one in found.values()) <= 1e-5


@pytest.mark.parametrize("engine", ["ddp", SOAKED_JAX, XLA])
def test_steps_of_wrapped_optimizers_and_samples_of_two_loaders_are_counted(engine, tmp_path):
    """SAM, lookahead, two optimizers; a zip of two loaders, batches that nothing is made of."""
    found = counted(engine, tmp_path)
    never, before, twice = (
        found.pop(case) for case in ("never_stepped", "built_before", "twice_by_one")
    )
    assert {case: (one["steps"], one["samples"]) for case, one in found.items()} == COUNTED
    assert max(one["far"] for one in found.values()) <= (0 if engine == "ddp" else 1e-5)
    assert "without gradients of run.backward" in twice["error"]
    assert "no optimizer of the model's parameters has stepped" in never["error"]
    if engine == "xla":  # which has put other parameters in their places
        assert "build it after accelerate" in before["error"]
    else:
        assert (before["steps"], before["far"]) == (6, 0 if engine == "ddp" else before["far"])


def test_passes_that_are_left_or_in_eval_mode_are_counted_and_closed(tmp_path):
    done = python("-m", "tests.training.own_passes", tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    left, persistent = found["left"], found["persistent"]
    assert left["windows"] == [[0, 0, 2], [0, 2, 1], [1, 3, 2], [1, 5, 1]]
    assert left["outside_windows_s"] >= left["others_s"]
    assert left["kept"] == [0, 0]  # neither a thread nor a process of an epoch that was left
    assert [window[1:] for window in found["one_batch_each"]["windows"]] == [[0, 2], [2, 2], [4, 1]]
    assert persistent["batches"] == [[0.0], [0.0, 1.0, 2.0]]  # the outer loop, the one within it
    assert persistent["kept"] == [0, 1]
    in_eval_mode = found["in_eval_mode"]
    assert in_eval_mode["windows"] == [[0, 0, 2], [0, 2, 1], [1, 3, 2], [1, 5, 1]]
    assert in_eval_mode["wall_s"] >= in_eval_mode["slept_s"]
    assert (in_eval_mode["batch_size"], in_eval_mode["num_samples"]) == (2, 2 * 5)
    lists = found["lists_of_images"]
    assert (lists["batch_size"], lists["num_samples"]) == (2, 5)


def test_two_workers_gather_each_sample_once_and_keep_a_loaders_class(tmp_path):
    done = two_ranks("-m", "tests.training.own_loaders", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"run-rank{rank}.json").read_text())
        assert found["scaled"] == pytest.approx(1000 * found["plain"])
        assert found["gathered"] == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert found["number"] == found["behind"] == [0.0, 1.0]
        assert found["uneven"] == [0.0] + [1.0, 1.0]
        assert found["complex"] == [[0.0, 1.0]] * 3 + [[1.0, 1.0]] * 3
        assert found["attribute"] == "kept"
        assert "a Whole that takes its samples past its sampler" in found["past_its_sampler"]
