"""docs/extending.md: its examples are plug-ins that the contracts accept."""

import contextlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accbench.recording import records
from tests.conftest import ROOT, python
from tests.engine_params import COMPILED

with contextlib.suppress(ImportError):  # sets environment variables, so before any test
    import jax  # noqa: F401

PAGE = (ROOT / "docs" / "extending.md").read_text()


BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def block_with(text: str) -> str:
    (block,) = (block for block in BLOCKS if text in block)
    return block


def example(name: str) -> Any:
    """Return what the page's example of `name` defines."""
    (block,) = (block for block in BLOCKS if re.search(rf"^(?:class|def) {name}\b", block, re.M))
    namespace: dict[str, Any] = {"__name__": "example"}
    exec(block, namespace)
    return namespace[name]


@pytest.mark.parametrize("name", ["Engine", "Source", "Launcher"])
def test_example_defines_all_that_the_contract_asks_for(name):
    plugin = example(name)
    assert not inspect.isabstract(plugin)


def test_source_reads_an_image():
    image_HWC, label = example("Squares")(8).read(200)
    assert (image_HWC.shape, label) == ((8, 8, 3), 1)


def test_options_have_help_and_range():
    (field,) = example("Options").__dataclass_fields__.values()
    assert field.metadata["help"].endswith(".")
    assert field.metadata["minimum"] == 1


def test_lowering_is_in_the_table():
    pytest.importorskip("jax")
    from accbench.engines.jax.lowering import table

    example("foo")
    try:
        assert table.row("aten.foo.default").function(1, 2, alpha=3) == 7
    finally:
        del table._rows["aten.foo.default"]


@pytest.mark.parametrize("engine", COMPILED)
def test_an_optimizer_is_one_file_in_every_engine(engine, tmp_path, plain_losses):
    """The page's example, as a package of one's own has it; torch's class is the measure."""
    losses = train(engine, tmp_path)
    assert losses == pytest.approx(plain_losses, rel=1e-5)
    assert losses[-1] < losses[0]


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory) -> Path:
    """A run of torch's class, whose worker the page's launcher starts."""
    folder = tmp_path_factory.mktemp("ddp")
    train("ddp", folder, "--launcher=nice")
    return folder / "run"


@pytest.fixture(scope="module")
def plain_losses(plain_run) -> list[float]:
    return losses_of(plain_run)


def test_a_launcher_starts_a_worker(plain_run):
    header, *_, end = records.read(plain_run / "records.jsonl")
    assert isinstance(header, records.RunRecord)
    assert header.task["launcher"] == "nice"
    assert isinstance(end, records.EndRecord)
    assert (end.status, end.num_steps) == ("ok", 3)


def test_a_launcher_starts_all_ranks_and_tells_their_failure_once(tmp_path):
    flags = "--launcher=nice", "--nproc_per_node=2", "--model=tests.nets:raising"
    done = start("ddp", tmp_path, *flags)
    assert done.returncode == 1
    assert len(re.findall(r"accbench: rank [01] failed: ValueError", done.stderr)) == 1, done.stderr
    header, *_, end = records.read(tmp_path / "run" / "records.jsonl")
    assert isinstance(header, records.RunRecord)
    assert header.world_size == 2
    assert isinstance(end, records.EndRecord)
    assert end.status == "error"


def test_a_report_column_takes_two_places(plain_run, tmp_path):
    """The page's lines, added to two modules of a copy."""
    shutil.copytree(ROOT / "accbench", tmp_path / "accbench")
    report = tmp_path / "accbench" / "report"
    field, value, column = re.findall(r"^```diff\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    apply(field, report / "summary.py")
    apply(value, report / "summary.py")
    apply(column, report / "table.py")
    done = subprocess.run(
        [sys.executable, "-m", "accbench", "report", str(plain_run), "--format=md"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    titles, _, cells = (line.split("|") for line in done.stdout.splitlines()[:3])
    windows = [r for r in records.read(plain_run / "records.jsonl")
               if isinstance(r, records.WindowRecord) and not r.warmup]  # fmt: skip
    expected = f"{sum(window.wall_s for window in windows):,.1f}"
    assert cells[titles.index(" steady s ")].strip() == expected


def apply(diff: str, path: Path) -> None:
    """Add a block's new lines before the line that it ends with."""
    *added, (mark, *context) = diff.splitlines(keepends=True)
    text, line = path.read_text(), "".join(context)
    assert mark == " "
    assert text.count(line) == 1
    path.write_text(text.replace(line, "".join(a.removeprefix("+") for a in added) + line))


def train(engine: str, folder: Path, *flags: str) -> list[float]:
    """Train three steps with the page's optimizer, and return each step's loss."""
    done = start(engine, folder, *flags)
    assert done.returncode == 0, done.stderr
    return losses_of(folder / "run")


def losses_of(run: Path) -> list[float]:
    windows = records.read(run / "records.jsonl")
    return [record.loss for record in windows if isinstance(record, records.WindowRecord)]


def start(engine: str, folder: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    """Run with the page's optimizer and launcher, as a package of one's own has them."""
    (folder / "adagrad.py").write_text(block_with("--optimizer adagrad"))
    (folder / "nice_launcher.py").write_text(block_with("--launcher nice"))
    metadata = folder / "of_ones_own-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: of-ones-own\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[accbench.optimizers]\nadagrad = adagrad:Optimizer\n"
        "[accbench.launchers]\nnice = nice_launcher:Launcher\n"
    )
    return python(
        "-m", "accbench", "run", "--model=accbench.machine.self_test:net", "--data=synthetic",
        "--image_size=32", "--batch_size=4", "--device=cpu", f"--engine={engine}",
        "--optimizer=adagrad", "--amp_level=O0", "--max_steps=3", "--warmup_steps=1",
        "--log_interval=1", "--workers=0", "--save_interval=0", "--eval_interval=0",
        *flags, f"--output_dir={folder / 'run'}",
        PYTHONPATH=os.pathsep.join([str(folder), str(ROOT)]),
    )  # fmt: skip
