"""docs/extending.md: its examples are plug-ins that the contracts accept."""

import contextlib
import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest

from accbench.recording import records
from tests.conftest import ROOT, python
from tests.engine_params import COMPILED

with contextlib.suppress(ImportError):  # sets environment variables, so before any test
    import jax  # noqa: F401

PAGE = (ROOT / "docs" / "extending.md").read_text()


def example(name: str) -> Any:
    """Return what the page's example of `name` defines."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if re.search(rf"^(?:class|def) {name}\b", block, re.M))
    namespace: dict[str, Any] = {"__name__": "example"}
    exec(block, namespace)
    return namespace[name]


@pytest.mark.parametrize("name", ["Engine", "Source"])
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
def plain_losses(tmp_path_factory) -> list[float]:
    return train("ddp", tmp_path_factory.mktemp("ddp"))


def train(engine: str, folder: Path) -> list[float]:
    """Train three steps with the page's optimizer, and return each step's loss."""
    (block,) = (b for b in re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
                if "--optimizer adagrad" in b)  # fmt: skip
    (folder / "adagrad.py").write_text(block)
    metadata = folder / "of_ones_own-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: of-ones-own\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[accbench.optimizers]\nadagrad = adagrad:Optimizer\n"
    )
    done = python(
        "-m", "accbench", "run", "--model=accbench.machine.self_test:net", "--data=synthetic",
        "--image_size=32", "--batch_size=4", "--device=cpu", f"--engine={engine}",
        "--optimizer=adagrad", "--amp_level=O0", "--max_steps=3", "--warmup_steps=1",
        "--log_interval=1", "--workers=0", "--save_interval=0", "--eval_interval=0",
        f"--output_dir={folder / 'run'}", PYTHONPATH=os.pathsep.join([str(folder), str(ROOT)]),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    windows = records.read(folder / "run" / "records.jsonl")
    return [record.loss for record in windows if isinstance(record, records.WindowRecord)]
