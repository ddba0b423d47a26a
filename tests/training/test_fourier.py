"""Complex parameters train as by plain torch, or are refused in one line."""

import importlib.util
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from accbench.config import TaskConfig
from accbench.distributed.process_group import Topology
from accbench.engines import ddp
from accbench.engines.common import training_state
from accbench.recording import records
from accbench.training import checkpoint_file
from tests.conftest import TINY, of_kind, python, run, two_ranks
from tests.training import fourier

needs_jax = pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="no jax")
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="no g++")
FLAGS = (
    *TINY, "--image_size=8", "--data=synthetic", "--model=tests.training.fourier:operator",
    "--save_interval=0", "--max_steps=3", "--warmup_steps=1", "--clip_norm=0.5", "--lr=0.01",
    "--weight_decay=0.1", "--decay=matrices",
)  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "optimizer"),
    [
        ("ddp", "AdamW"),
        pytest.param("jax", "SGD", marks=[needs_jax, pytest.mark.soak]),
        pytest.param("inductor", "SGD", marks=[needs_compiler, pytest.mark.soak]),
    ],
)
def test_an_own_loop_trains_as_plainly_also_on_two_workers(engine, optimizer, tmp_path):
    done = two_ranks("-m", "tests.training.fourier", engine, optimizer, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"run-rank{n}.json").read_text()) for n in range(2)]
    of_both = [sum(losses) / 2 for losses in zip(*(one["losses"] for one in found), strict=True)]
    assert of_both == pytest.approx(found[0]["plain"], rel=1e-5)
    for one in found:
        assert one["far"] < 1e-5


def test_engine_ddp_trains_them_to_the_bit(tmp_path):
    done = python("-m", "tests.training.fourier", "ddp", "AdamW", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "run-rank0.json").read_text())
    assert (found["losses"], found["far"]) == (found["plain"], 0)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fourier") / "reference"
    done = run("accbench.comparing.numerics", "reference", 2, *FLAGS, f"--output_dir={folder}",
               script="-m")  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(
    "engine",
    [
        "ddp",
        pytest.param("jax", marks=needs_jax),
        pytest.param("inductor", marks=[needs_compiler, pytest.mark.soak]),
    ],
)
def test_steps_of_two_workers_are_float64s(reference, engine, tmp_path):
    """Gradients, clipping, decay of matrices alone, AdamW's moments, buffers, a free run."""
    done = run("accbench.comparing.numerics", "check", reference, *FLAGS, f"--engine={engine}",
               "--nproc_per_node=2", f"--output_dir={tmp_path / 'run'}", script="-m")  # fmt: skip
    assert done.returncode == 0, done.stderr
    steps = [r for r in of_kind(tmp_path / "run", records.NumericsRecord) if r.phase == "step"]
    assert len(steps) == 3
    for step in steps:
        assert {"update of net.spectral.weight", "buffer net.spectral.shift"} < set(step.distances)
        assert max(map(abs, step.distances.values())) < 1e-4


def test_checkpoints_hold_them_and_their_moments(tmp_path):
    torch.manual_seed(0)
    nets = [fourier.operator(3), fourier.operator(3)]
    optimizers = [torch.optim.AdamW(net.parameters(), 0.1) for net in nets]
    nets[0](torch.rand(2, 3, 8, 8)).square().sum().backward()
    optimizers[0].step()
    before = training_state.read(nets[0], optimizers[0], None)
    facts = checkpoint_file.CheckpointFacts(1, 0, None, 1, "ddp", "operator", 0, 3, {})
    folder = tmp_path / "saved"
    checkpoint_file.write(folder, checkpoint_file.Checkpoint(facts, before, ()))
    assert not any(t.is_complex() for t in load_file(folder / "tensors.safetensors").values())
    training_state.load(nets[1], optimizers[1], None, checkpoint_file.read(folder).state)
    after = training_state.read(nets[1], optimizers[1], None)
    for name, tensor in before.model.items():
        assert torch.equal(tensor, after.model[name])
    for key, moment in before.optimizer["spectral.weight"].items():
        assert torch.equal(moment, after.optimizer["spectral.weight"][key])


def test_float16s_loss_scale_is_taken_out_and_overflows_are_skipped():
    task = TaskConfig(device="cpu", amp_level="O1", amp_dtype="float16", script="own.py")
    engine = ddp.Engine(task, ddp.Engine.Options(), Topology())
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(3, dtype=torch.cfloat))
    plain = torch.nn.Parameter(weight.detach().clone())
    optimizer, of_plain = torch.optim.Adam([weight], 0.1), torch.optim.Adam([plain], 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        of_plain.zero_grad()
        engine.backward((weight.conj() * weight).real.sum())
        (plain.conj() * plain).real.sum().backward()
        engine.step_optimizer(optimizer)
        of_plain.step()
    assert torch.equal(weight, plain)
    scale = engine.precision.loss_scale()
    engine.backward((weight.conj() * weight).real.sum() * float("inf"))
    engine.step_optimizer(optimizer)
    assert torch.equal(weight, plain)
    assert engine.precision.loss_scale() == scale / 2


@pytest.mark.xla
@pytest.mark.skipif(not importlib.util.find_spec("torch_xla"), reason="no torch_xla")
def test_torch_xla_cannot_and_says_so(tmp_path):
    done = run(*FLAGS, "--engine=xla", f"--output_dir={tmp_path / 'run'}")
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "torch_xla has no complex parameters, as net.spectral.weight is" in line
    assert "use --engine jax, inductor or ddp" in line
