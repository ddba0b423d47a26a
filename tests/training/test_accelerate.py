"""Loops of a user's own through every engine: `accbench.accelerate` and `--script`."""

import gzip
import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import cache

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
)

import accbench
from accbench.distributed.process_group import Topology
from accbench.errors import RequestError
from accbench.recording import records
from accbench.training import accelerated_loader
from tests import conftest
from tests.conftest import HANG_S, ROOT, end_of, of_kind, run
from tests.engine_params import NEEDS_JAX

OWN_SCRIPT = ROOT / "tests/scripts/own_script.py"
TINY_RUN = ("--amp_level=O0", "--threads=1", "--tensorboard=off", "--warmup_steps=2")
EXAMPLES = ("vision", "language")
ENGINES = ["ddp", "inductor", pytest.param("xla", marks=pytest.mark.xla)]
if importlib.util.find_spec("jax"):
    ENGINES.append("jax")


def python(*arguments, folder=ROOT):
    """Run what a person starts by `python`, in a forked process."""
    options = json.dumps({"folder": str(folder)})
    return conftest.python("-m", "tests.started", options, *arguments, OMP_NUM_THREADS="1")


def launched(*arguments):
    return run("-m", "accbench", "run", *TINY_RUN, *arguments, script="-B")


# Of engine jax, which compiles the model alone: a graph to train, one to evaluate, several backward
# passes a step, clipping, a model that was trained before, float16 and dropout. What optimizers and
# schedulers do is torch's; `make soak` has all of them.
OF_JAX = (
    "adamw", "sgd", "scheduler before", "accumulation", "clipping", "evaluation",
    "state from before", "overflow", "dropout",
)  # fmt: skip
NUM_LOOPS = 20


@pytest.fixture(scope="module", params=[
    pytest.param(("ddp", ()), id="ddp"),
    pytest.param(("inductor", ()), id="inductor", marks=pytest.mark.soak),
    pytest.param(("xla", ()), id="xla", marks=pytest.mark.xla),
    pytest.param(("jax", OF_JAX), id="jax", marks=NEEDS_JAX),
    pytest.param(("jax", ()), id="jax-all", marks=[NEEDS_JAX, pytest.mark.soak]),
])  # fmt: skip
def own_loops(request, tmp_path_factory):
    """(engine, case -> [distance of losses, of parameters], folder), of many loops in one process.

    Of a parameter without cases it is all of them.
    """
    engine, cases = request.param
    out = tmp_path_factory.mktemp(f"own-loops-{engine}")
    result = conftest.python(
        "tests/scripts/own_loops.py", out, engine, *cases, PJRT_DEVICE="CPU", OMP_NUM_THREADS="1"
    )
    assert result.returncode == 0, result.stderr
    found = json.loads((out / "found.json").read_text())
    assert len(found) == (len(cases) or NUM_LOOPS)
    return engine, found, out


def test_loops_train_as_by_plain_torch(own_loops):
    """Optimizers, schedulers made before and after, tied weights, accumulation, clipping, dropout,
    and evaluation in between; by ddp to the last bit."""
    engine, found, _ = own_loops
    limit = 0 if engine == "ddp" else 1e-5
    assert {case: d for case, d in found.items() if not max(d) <= limit} == {}


def test_evaluation_and_batches_of_a_step_are_in_no_ones_way(own_loops):
    engine, _, out = own_loops
    evaluated, plain = (
        of_kind(out / name, records.WindowRecord) for name in ("evaluation", "adamw")
    )
    assert [(w.epoch, w.first_step, w.num_steps) for w in evaluated] == [
        (0, 0, 2), (0, 2, 3), (0, 5, 1), (1, 6, 3), (1, 9, 3),
    ]  # fmt: skip
    assert [w.first_step for w in plain] == [w.first_step for w in evaluated]
    for name in ("adamw", "sgd", "evaluation", "scheduler-before"):
        end = end_of(out / name)
        assert (end.status, end.num_steps, end.num_samples) == ("ok", 12, 48)
        assert (end.num_recompiles, end.num_fallbacks, end.skipped_steps) == (0, 0, 0)
        assert end.num_graphs == (0 if engine == "ddp" else 1)
    overflown = end_of(out / "overflow")
    assert (overflown.num_steps, overflown.skipped_steps) == (3, 1)
    accumulated = end_of(out / "accumulation")
    assert (accumulated.num_steps, accumulated.num_samples) == (4, 48)


@cache
def plain_losses(example):
    result = python(f"examples/{example}/plain.py")
    assert result.returncode == 0, result.stderr
    return losses_of(result.stdout)


def losses_of(output):
    return [float(loss) for loss in re.findall(r"^epoch \d+  loss (\S+)$", output, re.M)]


# Each example with two of the engines; `make soak` has the others.
SOAKED = {("vision", "xla"), ("vision", "jax"), ("language", "ddp"), ("language", "inductor")}


@pytest.mark.parametrize(("example", "engine"), [
    pytest.param(example, name, marks=[pytest.mark.soak] if (example, name) in SOAKED else [])
    for example in EXAMPLES for name in ("ddp", "inductor", "xla", "jax")
])  # fmt: skip
def test_examples_train_the_same_before_and_after(example, engine, tmp_path):
    if not importlib.util.find_spec({"xla": "torch_xla", "jax": "jax"}.get(engine, "torch")):
        pytest.skip("not installed")
    expected = plain_losses(example)
    exact = engine == "ddp"
    result = launched(
        f"--script=examples/{example}/accelerated.py", f"--engine={engine}",
        f"--output_dir={tmp_path}", "--max_steps=6",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    losses = losses_of(result.stdout)
    assert len(losses) == (6 if example == "vision" else 12)
    assert losses == pytest.approx(expected[: len(losses)], rel=0 if exact else 1e-4)
    end = end_of(tmp_path)
    assert (end.status, end.num_steps) == ("ok", 6)
    assert (end.num_recompiles, end.num_fallbacks) == (0, 0)


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_documented_change_is_that_of_the_examples(example):
    """At most six lines, and the page shows them."""
    folder = ROOT / "examples" / example
    changed = subprocess.run(
        ["diff", "-U1", "plain.py", "accelerated.py"], cwd=folder, capture_output=True, text=True
    ).stdout
    lines = [line for line in changed.splitlines() if not line.startswith(("---", "+++", "@@"))]
    assert 0 < sum(line.startswith("+") for line in lines) <= 6
    shown = (ROOT / "docs/accelerate.md").read_text()
    for line in lines:
        if line.strip("+- "):
            assert line in shown.splitlines(), line


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "inductor"])
def test_two_workers_are_one_with_the_double_batch(engine, tmp_path):
    """Gradients are averaged, before they are clipped; samples are shared out."""
    found = []
    for num_workers in (1, 2):
        out = tmp_path / f"{num_workers}.pt"
        result = launched(
            f"--script={OWN_SCRIPT}", f"--script_args=nothing batch={8 // num_workers} out={out}",
            f"--nproc_per_node={num_workers}", f"--engine={engine}",
            f"--output_dir={tmp_path / str(num_workers)}",
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        found.append(torch.load(out))
    one, two = found
    assert two["norms"] == pytest.approx(one["norms"], rel=1e-5)
    assert min(one["norms"]) > 0.1  # all were clipped
    for name, tensor in one["net"].items():
        torch.testing.assert_close(two["net"][name], tensor, rtol=1e-4, atol=1e-6)
    header = of_kind(tmp_path / "2", records.RunRecord)[0]
    assert (header.world_size, header.batch_size, header.model) == (2, 4, "Sequential")
    assert end_of(tmp_path / "2").num_samples == end_of(tmp_path / "1").num_samples == 64


@pytest.mark.xla
def test_a_comparison_judges_the_script(tmp_path):
    """Round by round, and step by step beside the same script in float64."""
    flags = ("--engines=ddp,xla,xla:replay=off", "--max_steps=12", "--log_interval=2")
    # More steps than the script has, which are 16.
    flags = (*flags, "--numerics_steps=20", "--repeats=2", f"--output_dir={tmp_path / 'c'}")
    result = conftest.python(
        "-m", "tests.compared", *TINY_RUN, *flags, f"--script={OWN_SCRIPT}",
        "--script_args=nothing spoil=replay",
    )  # fmt: skip
    assert result.returncode == 1, result.stderr  # a row differs, and so is not valid
    rows = json.loads((tmp_path / "c/report.json").read_text())["rows"]
    assert [row["rounds_ok"] for row in rows] == [2, 2, 2]
    same, also, spoiled = (row["numerics"] for row in rows)
    assert same["verdict"] == also["verdict"] == "trains the same", result.stdout
    assert spoiled["verdict"] == "differs"
    assert "loss" in spoiled["reason"]
    assert "16 steps beside float64, 16 of them sharp tests" in result.stdout
    assert "also tested: a free run; not tested, of a script: evaluation" in result.stdout


def test_torchrun_starts_a_script(tmp_path):
    torchrun = ("-m", "tests.all_forked", "-m", "torch.distributed.run", "--standalone")
    keywords = ("amp_level=O0", "threads=1", "tensorboard=off", "max_steps=6")
    result = conftest.python(
        *torchrun, "--nproc_per_node=2", OWN_SCRIPT, "nothing", *keywords,
        f"output_dir={tmp_path}/run", OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert end_of(tmp_path / "run").num_samples == 6 * 4 * 2
    assert (tmp_path / "run/logs/rank1.log").exists()


def test_a_script_alone_is_a_run(tmp_path):
    """Started by Python, it ends with its record; also where it raises, or at --max_steps."""
    for how, status, told in (("nothing", 0, "ok"), ("raise", 1, "error")):
        result = python(OWN_SCRIPT, how, "tensorboard=off", f"output_dir={how}", folder=tmp_path)
        assert result.returncode == status, result.stderr
        end = end_of(tmp_path / how)
        assert (end.status, end.num_steps) == (told, 16)
    assert "ValueError: the script's own trouble" in result.stderr
    assert end.error == "rank 0: ValueError: the script's own trouble"
    result = python(OWN_SCRIPT, "raise", "max_steps=7", folder=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-ddp-own_script")
    assert end_of(folder).num_steps == 7


@pytest.mark.parametrize(
    ("how", "status", "told"),
    [
        ("raise", 1, "rank 0 failed: ValueError: the script's own trouble"),
        ("exit", 1, "ended by exit status 3"),
        ("dead", 2, "never called accbench.accelerate"),
        ("nothing engne=xla", 2, "accelerate has no keyword engne; perhaps you meant engine"),
    ],
)
def test_a_script_that_fails_says_so_in_its_record(how, status, told, tmp_path):
    script = f"--script={OWN_SCRIPT}"
    result = launched(script, f"--script_args={how}", f"--output_dir={tmp_path}")
    assert result.returncode == status
    assert told in result.stderr
    end = end_of(tmp_path)
    assert end.status == "error"
    assert told in end.error


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--script=missing.py"], "--script missing.py: there is no such file"),
        ([f"--script={OWN_SCRIPT}", "--lr=0.1"], "--lr is not for a script"),
        ([f"--script={OWN_SCRIPT}", "--script_args='"], "--script_args"),
        pytest.param(
            [f"--script={OWN_SCRIPT}", "--engine=jax", "--device=cuda"], "on a CPU alone",
            marks=pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="needs jax"),
        ),
    ],
)  # fmt: skip
def test_flags_that_a_script_cannot_have(flags, told, tmp_path):
    result = launched(*flags, f"--output_dir={tmp_path / 'run'}")
    assert result.returncode == 2
    assert told in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_what_accelerate_refuses():
    """Before anything is made or changed."""
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for arguments, keywords, told in (
        ((optimizer, net), {}, "the model is a SGD, not a torch Module"),
        ((net, [optimizer]), {}, "the optimizer is a list"),
        ((net, optimizer), {"nproc_per_node": 2}, "nproc_per_node: that is a launcher's"),
        ((net, optimizer), {"lr": 0.1}, "no keyword lr: that is the script's own"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=told):
            accbench.accelerate(*arguments, **keywords)
    assert type(net) is nn.Linear


def test_samples_are_shared_out_or_refused():
    data = TensorDataset(torch.arange(10))
    second = Topology(rank=1, local_rank=1, world_size=2, local_world_size=2)
    shared, sampler = accelerated_loader.shard_loader(DataLoader(data, 2), second, seed=0)
    assert [batch.tolist() for (batch,) in shared] == [[1, 3], [5, 7], [9]]
    shuffled, sampler = accelerated_loader.shard_loader(
        DataLoader(data, 2, shuffle=True), second, 0
    )
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        orders.append([n for (batch,) in shuffled for n in batch.tolist()])
    assert orders[0] != orders[1]
    weighted = WeightedRandomSampler([1.0] * 10, 10)
    for loader in (DataLoader(data, 2, sampler=weighted), DataLoader(_Stream(), 2), [1, 2]):
        with pytest.raises(RequestError, match="cannot be shared out over 2 workers"):
            accelerated_loader.shard_loader(loader, second, 0)
        assert accelerated_loader.shard_loader(loader, Topology(), 0) == (loader, None)


def test_a_sampler_of_another_worker_is_refused():
    data = TensorDataset(torch.arange(10))
    second = Topology(rank=1, local_rank=1, world_size=2, local_world_size=2)

    def sharded(topology, *ranks):
        inner = BatchSampler(DistributedSampler(data, *ranks), 2, False)
        for loader in (
            DataLoader(data, 2, sampler=inner.sampler),
            DataLoader(data, batch_sampler=inner),
        ):
            assert accelerated_loader.shard_loader(loader, topology, 0) == (loader, None)
        del inner.sampler.rank
        assert accelerated_loader.shard_loader(loader, topology, 0) == (loader, None)

    sharded(second, 2, 1)
    sharded(Topology(), 1, 0)
    for topology, *ranks in ((second, 1, 0), (second, 2, 0), (second, 4, 1), (Topology(), 2, 0)):
        told = f"rank {ranks[1]} of {ranks[0]}, and this worker is rank {topology.rank} of "
        with pytest.raises(RequestError, match=told):
            sharded(topology, *ranks)


class _Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def test_importing_accbench_changes_nothing():
    code = (
        "import os, sys; before = dict(os.environ); import accbench; "
        "assert 'torch' not in sys.modules and dict(os.environ) == before; "
        "import torch; step = torch.optim.SGD.step; call = torch.nn.Module.__call__; "
        "accbench.accelerate; assert dict(os.environ) == before; "
        "assert torch.optim.SGD.step is step and torch.nn.Module.__call__ is call"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


CLOSED = """
import atexit, sys
import torch.distributed as dist
atexit.register(lambda: print("group at the end:", dist.is_initialized()))  # runs last
import torch, accbench
net = torch.nn.Linear(2, 2)
run = accbench.accelerate(
    net, torch.optim.SGD(net.parameters(), lr=0.1), [torch.ones(2, 2)] * 2, sharded=True,
    device="cpu", threads=1, tensorboard="off", output_dir=sys.argv[1],
)
for inputs in run.loaders[0]:
    run.backward(net(inputs).sum())
    run.optimizer.step()
run.close()
"""


@pytest.mark.parametrize("words", [
    pytest.param(("-m", "tests.started", "{}"), id="forked"),
    pytest.param((), id="anew", marks=pytest.mark.soak),  # where they might abort it
])  # fmt: skip
def test_a_closed_run_leaves_no_process_group_that_would_abort_the_script(words, tmp_path):
    """Gloo's threads did so in four of twelve scripts that called `run.close()`."""
    script = tmp_path / "closed.py"
    script.write_text(CLOSED)
    done = conftest.several_ranks(2, *words, script, tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("group at the end: False") == 2


LEFT_OPEN = """
import gzip, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import torch, accbench
net = torch.nn.Linear(2, 2)
run = accbench.accelerate(
    net, torch.optim.SGD(net.parameters(), lr=0.1), [torch.ones(2, 2)] * 2, sharded=True
)
for inputs in run.loaders[0]:
    run.backward(net(inputs).sum())
    run.optimizer.step()
late = Path(sys.argv[1], f"late-{run.rank}")
sys.executor = ThreadPoolExecutor(1)  # lives on, as inductor's do
sys.executor.submit(lambda: (time.sleep(0.5), late.touch()))
sys.text = late.with_name(f"text-{run.rank}").open("w")
sys.text.write("left open")
sys.packed = gzip.open(late.with_name(f"packed-{run.rank}"), "wt")
sys.packed.write("left open")
"""


def test_a_script_s_threads_and_open_files_end_before_its_workers_do(tmp_path):
    script = tmp_path / "left_open.py"
    script.write_text(LEFT_OPEN)
    result = launched(
        f"--script={script}", f"--script_args={tmp_path}", "--nproc_per_node=2", "--device=cpu",
        f"--output_dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in tmp_path.glob("late-*")) == ["late-0", "late-1"]
    for rank in (0, 1):
        assert (tmp_path / f"text-{rank}").read_text() == "left open"
        assert gzip.decompress((tmp_path / f"packed-{rank}").read_bytes()) == b"left open"
