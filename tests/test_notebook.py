"""The notebook runs from top to bottom, and is committed with outputs."""

import contextlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

from accbench.errors import RequestError
from accbench.recording import records
from accbench.system import folders
from tests import asking_python
from tests.conftest import (
    HANG_S,
    ROOT,
    TINY,
    end_of,
    forker,
    of_kind,
    processes_of,
    run,
    wait_until,
)

NOTEBOOK = ROOT / "notebooks" / "resnet50.ipynb"


def texts(notebook) -> str:
    return "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ())
    )


# Of a notebook's own Python, each process imports torch anew.
@pytest.mark.parametrize("commands", ["forked", pytest.param("own", marks=pytest.mark.soak)])
@pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed")
def test_runs_from_top_to_bottom(tmp_path, commands):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (flags,) = (cell for cell in notebook.cells if "--model=resnet18" in cell.source)
    # Other tests have the other core.
    small = "--model=tests.nets:tiny --threads=1 --workers=0"
    flags.source = flags.source.replace("--model=resnet18", small)
    client = NotebookClient(notebook, timeout=HANG_S, resources={"metadata": {"path": str(ROOT)}})
    # The kernel's `python` and prepare.sh's environment are those of this test.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {"PATH": path, "VIRTUAL_ENV": sys.prefix, "TMPDIR": str(tmp_path)}
    with contextlib.ExitStack() as stack:
        if commands == "forked":
            stack.enter_context(asking_python.made_in(tmp_path, forker()))
            environment["PATH"] = os.pathsep.join((str(tmp_path), path))
        client.execute(env={**os.environ, **environment})
    assert texts(notebook).count("done: 15 steps") == 4
    pictures = [o for c in notebook.cells for o in c.get("outputs", ()) if "data" in o]
    assert sum("image/png" in picture["data"] for picture in pictures) == 2


@pytest.fixture
def kernel(tmp_path):
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path, "SLOW_NET_S": "2"}
    # A socket in a folder of its own: no port that another test could take.
    manager = KernelManager(transport="ipc", ip=str(tmp_path / "kernel"))
    manager.start_kernel(cwd=str(ROOT), env=environment)
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=HANG_S)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()


def printed(client, request: str, until: str | None = None) -> str:
    """What a cell prints, waited for to these words or its end."""
    text, ended = "", False
    while not (ended or (until is not None and until in text)):
        message = client.get_iopub_msg(timeout=HANG_S)
        if message["parent_header"].get("msg_id") == request:
            text += message["content"].get("text", "")
            ended = message["content"].get("execution_state") == "idle"
    return text


def test_interrupted_cell_is_saved(kernel, tmp_path):
    """A kernel kills what a cell started half a second after Ctrl-C; a step here takes longer."""
    manager, client = kernel
    run_dir = tmp_path / "run"
    flags = (*TINY, "--model=tests.nets:deaf", "--data=synthetic", "--warmup_steps=1",
             "--log_interval=1", f"--output_dir={run_dir}")  # fmt: skip
    request = client.execute(f"!python launch_single_task.py {' '.join(flags)}")
    text = printed(client, request, until="step 1/6")
    manager.interrupt_kernel()
    text += printed(client, request)
    assert "step 1/6" in text
    assert "━" not in text  # a bar would be kept in the notebook, frame after frame

    def finishes_alone() -> bool:
        try:
            with folders.lock(run_dir):
                return False
        except RequestError:
            return True

    # Nothing else begins in its folder, unless it is over by the time that a busy kernel says so.
    wait_until(lambda: finishes_alone() or not processes_of(run_dir))
    wait_until(lambda: not processes_of(run_dir))
    end = end_of(run_dir)
    (saved,) = of_kind(run_dir, records.CheckpointRecord)
    assert end.status == "interrupted"
    assert 0 < saved.step == end.num_steps < 6
    resumed = run(*flags, "--resume=auto")
    assert "done: 6 steps" in resumed.stdout, resumed.stderr
    assert end_of(run_dir).status == "ok"


def test_is_committed_with_its_outputs():
    committed = nbformat.read(NOTEBOOK, as_version=4)
    assert texts(committed).count("done: 15 steps") == 4
    assert "Traceback" not in texts(committed)
