"""`--ddp.data_parallel`, torch.nn.DataParallel beside the other ways to share a batch."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from accbench import config, launchers
from accbench.comparing.plan import parse
from accbench.distributed.strategies.one_process import ReplicatedModel
from accbench.engines.ddp.options import data_parallel_problem
from accbench.errors import RequestError
from accbench.recording import records
from accbench.report import comparison
from tests.conftest import ROOT, TINY, python
from tests.distributed import data_parallel_on_cpu

TWO = "--ddp.data_parallel=2"
AT_ONCE = (
    "copies the whole model to each device and takes a batch at once; leave out --dp_shard, --tp, "
    "--cp, --pp, --offload and --accumulate"
)
ONE_WORKER = (
    "is one worker for all devices of this machine; use --nproc_per_node 1, without --launcher "
    "and --nnodes"
)


def test_a_cpu_is_refused_with_what_to_use():
    with pytest.raises(RequestError) as refused:
        launchers.resolve(config.parse([TWO, "--device=cpu", "--data=synthetic"]))
    assert str(refused.value) == (
        "--ddp.data_parallel 2: torch.nn.DataParallel shares nothing on a CPU; use "
        "--nproc_per_node 2 in its place"
    )


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ((TWO, "--nproc_per_node=2"), f"--ddp.data_parallel 2 {ONE_WORKER}"),
        ((TWO, "--launcher=slurm"), f"--ddp.data_parallel 2 {ONE_WORKER}"),
        ((TWO, "--dp_shard=auto"), f"--ddp.data_parallel 2 {AT_ONCE}"),
        ((TWO, "--accumulate=2"), f"--ddp.data_parallel 2 {AT_ONCE}"),
        (
            ("--ddp.data_parallel=4", "--batch_size=10"),
            "--ddp.data_parallel 4: --batch_size 10 is no multiple of it; use 8",
        ),
        (
            ("--ddp.data_parallel=99", "--batch_size=99"),
            f"--ddp.data_parallel 99 is more than the {torch.cuda.device_count()} CUDA devices "
            "here",
        ),
        (("--batch_size=9",), None),
    ],
)
def test_refusals(flags, line):
    task = dataclasses.replace(config.parse([*flags]), device="cuda")
    assert data_parallel_problem(task) == line


def test_a_row_says_why_it_cannot_be_measured():
    flags = ("--device=cpu", "--data=synthetic", "--nproc_per_node=2")
    plan = parse([*flags, "--engines=ddp,ddp,ddp:data_parallel=2"], "accbench compare").plan
    assert plan.rows[2].task is None
    assert "shares nothing on a CPU" in plan.rows[2].reason
    with pytest.raises(RequestError, match="no row but the baseline can run: .*data_parallel"):
        parse([*flags, "--engines=ddp,ddp:data_parallel=2"], "accbench compare")
    with pytest.raises(RequestError) as refused:
        parse([*flags, "--engines=ddp,ddp:data_parallel=3"], "accbench compare")
    assert str(refused.value) == (
        "--engines ddp:data_parallel=3: the other rows have --nproc_per_node 2, which is what "
        "data_parallel has to be"
    )


def test_threads_have_the_type_of_autocast(monkeypatch):
    """torch's own give them its default, so that float16 here would become bfloat16."""
    data_parallel_on_cpu.patch(monkeypatch.setattr)
    model = data_parallel_on_cpu.on_cpu(ReplicatedModel(nn.Linear(4, 2), device_ids=[0, 1]))
    with torch.autocast("cpu", torch.float16):
        assert model(torch.ones(6, 4)).dtype is torch.float16
    assert model(torch.ones(6, 4)).dtype is torch.float32


def headers_of(folder: Path) -> list[records.RunRecord]:
    return [run.header for row in comparison.read(folder).rows for run in row.rounds if run.header]


def test_compare_judges_a_row_of_one_process(tmp_path):
    """With BatchNorm over each device's part, and with dropout."""
    plugins = data_parallel_on_cpu.install(tmp_path / "plugins")
    folder = tmp_path / "compared"
    engines = "--engines=ddp,on_cpu:data_parallel=2"
    done = python(
        "-m", "tests.compared", *TINY, "--data=synthetic", "--device=cpu",
        "--repeats=2", "--no-repeat_disturbed", "--nproc_per_node=2", engines,
        "--model=tests.nets:dropping", "--numerics_steps=2", f"--output_dir={folder}",
        PYTHONPATH=os.pathsep.join((str(plugins), str(ROOT))),
    )  # fmt: skip
    report = json.loads((folder / "report.json").read_text())
    _, row = report["rows"]
    assert row["numerics"]["verdict"] == "trains the same", done.stdout + done.stderr
    assert row["speedup"] > 0
    facts = {(run.num_devices, run.batch_size) for run in headers_of(folder)}
    assert facts == {(2, 4), (2, 8)}
