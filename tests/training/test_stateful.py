"""Models whose state_dict holds more than tensors, or holds them in ways of its own."""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file

from accbench.distributed.parameter_shards import ShardedTensor
from accbench.engines.common import extra_state, model_state, training_state
from accbench.errors import RequestError
from accbench.models.tasks import trainable
from accbench.training import checkpoint_file, checkpoints
from tests.conftest import TINY, run, two_ranks
from tests.training import stateful

FLAGS = (*TINY, "--image_size=8", "--data=synthetic", "--warmup_steps=1", "--epochs=9")
SAVED = ("counting", "scaling", "renaming", "dropping", "transposing", "older", "plainly", "types",
         "normed", "all_of_them")  # fmt: skip


def trained(name: str, seed: int):
    torch.manual_seed(seed)
    net = trainable.plain(getattr(stateful, name)(3))
    return net, torch.optim.AdamW(net.parameters())


@pytest.mark.parametrize("name", SAVED)
def test_state_goes_through_a_checkpoint_into_a_new_model(name, tmp_path):
    net, optimizer = trained(name, 0)
    model_state.check_loadable(net)
    net(torch.rand(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    if name == "types":
        net[1].later = torch.ones(2)  # as a first forward pass may make it
    before = training_state.read(net, optimizer, None)
    facts = checkpoint_file.CheckpointFacts(1, 0, None, 1, "ddp", name, 0, 3, {})
    checkpoint_file.write(tmp_path / "saved", checkpoint_file.Checkpoint(facts, before, ()))
    saved = checkpoint_file.read(tmp_path / "saved").state
    other, its_optimizer = trained(name, 1)
    training_state.load(other, its_optimizer, None, saved)
    after = training_state.read(other, its_optimizer, None)
    for of_kind in ("model", "extra"):
        expected, found = getattr(before, of_kind), getattr(after, of_kind)
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            assert extra_state.equal(found[key], value), key
    inputs = torch.rand(2, 3, 8, 8)
    assert torch.equal(net(inputs), other(inputs))


class Gathered(ShardedTensor):
    """A tensor that another rank had."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.shape, self.dtype, self.whole = tuple(whole.shape), whole.dtype, whole

    def gather(self) -> torch.Tensor:
        return self.whole


FEW_KNOW = ("bool", "int16", "uint16", "uint32", "uint64", "float64", "bfloat16", "float8_e4m3fn",
            "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "complex64",
            "complex128")  # fmt: skip


def test_ranks_with_parts_write_tensors_of_all_types_and_read_their_rows(tmp_path):
    wholes = {name: (100 * torch.rand(3, 2)).to(getattr(torch, name)) for name in FEW_KNOW}
    wholes["number"] = torch.tensor(1 + 2j)
    parts = {f"staged.{name}": Gathered(whole) for name, whole in wholes.items()}
    state = training_state.TrainingState({**wholes, **parts}, {}, {})
    facts = checkpoint_file.CheckpointFacts(1, 0, None, 1, "ddp", "types", 0, 3, {})
    checkpoint_file.write(tmp_path / "saved", checkpoint_file.Checkpoint(facts, state, ()))
    at_once = checkpoint_file.read(tmp_path / "saved").state.model
    in_file = checkpoint_file.read(tmp_path / "saved", by_rows=True).state.model
    assert at_once.keys() == in_file.keys() == {*wholes, *parts}
    for key, tensor in at_once.items():
        expected = wholes[key.removeprefix("staged.")]
        assert extra_state.equal(tensor, expected), key
        assert extra_state.equal(in_file[key].read(), expected), key
        assert in_file[key].shape == tuple(expected.shape)
        if expected.dim():
            assert extra_state.equal(in_file[key][1:], expected[1:]), key


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("holding", "the extra state of module 1 holds a builtins.object, and a checkpoint holds"),
        ("one_way", "does not take 1._extra_state, which is saved"),
        ("forgetting", "does not take 1.steps, which is saved"),
    ],
)
def test_what_could_not_be_loaded_again_is_told_before_training(name, words):
    with pytest.raises(RequestError) as caught:
        model_state.check_loadable(trained(name, 0)[0])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_values_that_hold_themselves_are_none_that_can_be_saved():
    value: list = []
    value.append(value)
    with pytest.raises(extra_state.NotPlainError, match="nested more than"):
        extra_state.pack(value, [])


def extra_of(run_dir, step):
    return checkpoint_file.read(checkpoints.folder_of(run_dir, step)).state.extra


def test_two_workers_save_it_another_engine_goes_on_and_exports_carry_it(tmp_path):
    run_dir = tmp_path / "run"
    flags = (*FLAGS, "--model=tests.training.stateful:all_of_them", f"--output_dir={run_dir}")
    done = run(*flags, "--max_steps=4", "--nproc_per_node=2")
    assert done.returncode == 0, done.stderr
    key = "net.nets.0.1._extra_state"
    assert extra_of(run_dir, 4)[key]["forwards"] == 4
    engine = "xla" if importlib.util.find_spec("torch_xla") else "inductor"
    done = run(*flags, "--max_steps=10", "--resume=auto", f"--engine={engine}")
    assert done.returncode == 0, done.stderr
    saved = extra_of(run_dir, 10)
    assert saved[key]["forwards"] == 10
    assert saved[key]["others"] == {"names": ["a", ("b", None)], 3: 0.5}
    out = tmp_path / "out"
    done = run("accbench", "export", run_dir, out, "--format=state_dict", script="-m")
    assert done.returncode == 0, done.stderr
    exported = torch.load(out, weights_only=True)
    assert extra_state.equal(exported[key.removeprefix("net.")], saved[key])
    done = run("accbench", "export", run_dir, out, "--format=safetensors", script="-m")
    assert done.returncode == 0, done.stderr
    told = "without nets.0.1._extra_state, nets.1.1._extra_state, nets.4.1.steps, which are no"
    assert told in done.stdout
    assert load_file(out).keys() == {k for k, v in exported.items() if isinstance(v, torch.Tensor)}


def test_workers_begin_with_the_state_of_the_first_one(tmp_path):
    done = two_ranks("-m", "tests.training.stateful", "ddp", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"run-rank{n}.json").read_text()) for n in range(2))
    assert first == second
    assert "'forwards': 10" in first["nets.0.1._extra_state"]
    assert {"nets.5.1.unsaved", "nets.5.1.complex64", "nets.5.1.float8_e4m3fn"} < first.keys()


needs_jax = pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="no jax")


@needs_jax
def test_state_that_a_forward_pass_changes_is_refused_where_steps_are_captured(tmp_path):
    done = run(*FLAGS, "--model=tests.training.stateful:counting", "--engine=jax",
               f"--output_dir={tmp_path / 'run'}")  # fmt: skip
    assert done.returncode == 2
    assert "every forward pass changes net.1._extra_state" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@needs_jax
def test_buffers_of_all_types_stay_what_they_are_under_jax(tmp_path):
    done = run(*FLAGS, "--model=tests.training.stateful:types", "--engine=jax", "--max_steps=2",
               f"--output_dir={tmp_path / 'run'}")  # fmt: skip
    assert done.returncode == 0, done.stderr
    saved = checkpoint_file.read(checkpoints.folder_of(tmp_path / "run", 2)).state.model
    torch.manual_seed(0)
    (_, head) = stateful.types(1000)
    for name, buffer in head.named_buffers():
        expected = torch.tensor(2) if name == "count" else buffer
        assert extra_state.equal(saved[f"net.1.{name}"], expected), name
