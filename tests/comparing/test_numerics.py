"""The numerics pass finds planted errors and lets right engines be."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from accbench.comparing.numerics import Sketcher
from accbench.report import numerics
from accbench.report import run as runs
from accbench.report.comparison import Comparison, Plan, Row, RowPlan
from tests import planted
from tests.conftest import ROOT, TINY

STEPS = 6


def look(folder: Path, name: str, *flags: str, plugins: Path) -> runs.Run:
    """A pass of two workers."""
    path = os.pathsep.join((str(plugins), str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-m", "accbench.comparing.numerics", *TINY, "--nproc_per_node=2",
         "--device=cpu", "--data=synthetic", f"--max_steps={STEPS}",
         f"--output_dir={folder / name}", *flags],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return runs.read(folder / name)


@pytest.fixture(scope="module")
def passes(tmp_path_factory):
    """(run a pass, reference, baseline, baseline in the other layout)."""
    folder = tmp_path_factory.mktemp("numerics")
    plugins = planted.install(folder / "plugins")

    def one(name: str, *flags: str) -> runs.Run:
        return look(folder, name, *flags, plugins=plugins)

    reference = one("reference", "--float64", "--ddp.no-channels_last")
    return one, reference, one("baseline"), one("other", "--ddp.no-channels_last")


def judge(passes, found: runs.Run) -> numerics.Numerics:
    _, reference, baseline, other_layout = passes
    rows = (RowPlan("ddp", "ddp", {}), RowPlan("row", "row", {}))
    plan = Plan(rows, "ddp", 2, 0.02, STEPS, False)
    row = Row("row", (), numerics=found)
    comparison = Comparison(
        "c", plan, (Row("ddp", (), numerics=baseline), row), reference, other_layout
    )
    return numerics.judge(comparison, row)


def test_right_engine_trains_the_same(passes):
    verdict = judge(passes, passes[0]("threads", "--threads=2"))
    assert verdict.verdict == "trains the same", verdict
    assert verdict.dtype == "float32"


def test_the_reference_trains_as_float32_does_but_for_rounding(passes):
    _, reference, baseline, _ = passes
    for double, single in zip(reference.numerics[1:], baseline.numerics[1:], strict=True):
        assert double.loss == pytest.approx(single.loss, rel=1e-5)
        assert double.grad_norm == pytest.approx(single.grad_norm, rel=1e-4)


@pytest.mark.parametrize(
    ("engine", "where"),
    [("not_averaged", None), ("bn_momentum", "running_"), ("wrong_epsilon", "update of ")],
)
def test_planted_error_differs(passes, engine, where):
    verdict = judge(passes, passes[0](engine, f"--engine={engine}"))
    assert verdict.verdict == "differs"
    assert verdict.first_step == 1
    if where is None:
        assert "not averaged" in verdict.reason
    else:
        assert where in verdict.first_tensor


@pytest.mark.xla
@pytest.mark.skipif(find_spec("torch_xla") is None, reason="torch_xla is not installed")
def test_xla_trains_the_same(passes):
    verdict = judge(passes, passes[0]("xla", "--engine=xla"))
    assert verdict.verdict == "trains the same", verdict


def test_sketches_keep_distances():
    """Within the few standard deviations that the sketch's size promises, and linear."""
    generator = torch.Generator().manual_seed(0)
    sketcher = Sketcher()
    ratios = []
    for size in (10, 1000, 100_000):
        a, b = torch.randn(2, size, generator=generator).double()
        sketched = torch.tensor(sketcher.sketch(a)) - torch.tensor(sketcher.sketch(b))
        ratios.append(float(sketched.norm() / (a - b).norm()))
    assert all(0.4 < ratio < 1.8 for ratio in ratios), ratios
