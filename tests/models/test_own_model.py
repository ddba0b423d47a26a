"""The example of a package that brings its own model."""

import os
import shutil
import subprocess
import sys

import pytest

from accbench.recording import records
from tests.conftest import HANG_S, ROOT, command, end_of, of_kind, python


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder that the example is installed in, as pip does it."""
    folder = tmp_path_factory.mktemp("own_model")
    # From a copy, for building leaves files beside the source.
    shutil.copytree(ROOT / "examples" / "own_model", folder / "source")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation",
         "--target", folder / "site", folder / "source"],
        check=True, capture_output=True, timeout=HANG_S,
    )  # fmt: skip
    return folder / "site"


def start(installed, *flags):
    return python(*command(*flags)[1:], PYTHONPATH=os.pathsep.join([str(installed), str(ROOT)]))


def test_it_trains_by_its_name(installed, tmp_path):
    flags = ("--data=synthetic", "--amp_level=O0", "--workers=0", "--tensorboard=off")
    sizes = ("--max_steps=40", "--warmup_steps=1", "--log_interval=13", "--batch_size=64")
    result = start(
        installed, "--model=table_mlp", *flags, *sizes, "--lr=3e-3", "--synthetic.num_batches=1",
        f"--output_dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert end_of(tmp_path / "run").num_steps == 40
    first, *_, last = of_kind(tmp_path / "run", records.WindowRecord)
    assert last.loss < 0.5 * first.loss


def test_its_name_is_told_and_other_data_refused(installed, tmp_path):
    unknown = start(installed, "--model=table_mpl", f"--output_dir={tmp_path / 'run'}")
    assert unknown.returncode == 2
    assert "table_mlp, table_mlp_wide" in unknown.stderr
    refused = start(installed, "--model=table_mlp", f"--output_dir={tmp_path / 'run'}")
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert "--model table_mlp takes rows" in line
    assert "--data synthetic" in line
