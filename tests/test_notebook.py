"""The notebook runs from top to bottom, and is committed with outputs."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import HANG_S, ROOT

NOTEBOOK = ROOT / "notebooks" / "resnet50.ipynb"


def texts(notebook) -> str:
    return "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ())
    )


@pytest.mark.xla
@pytest.mark.skipif(find_spec("torch_xla") is None, reason="torch_xla is not installed")
def test_runs_from_top_to_bottom(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=HANG_S, resources={"metadata": {"path": str(ROOT)}})
    # The kernel's `python` and prepare.sh's environment are those of this test.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {"PATH": path, "VIRTUAL_ENV": sys.prefix, "TMPDIR": str(tmp_path)}
    client.execute(env={**os.environ, **environment})
    assert texts(notebook).count("done: 15 steps") == 4
    pictures = [o for c in notebook.cells for o in c.get("outputs", ()) if "data" in o]
    assert sum("image/png" in picture["data"] for picture in pictures) == 2


def test_is_committed_with_its_outputs():
    committed = nbformat.read(NOTEBOOK, as_version=4)
    assert texts(committed).count("done: 15 steps") == 4
    assert "Traceback" not in texts(committed)
