"""docs/first-hour.md: every block of the tutorial, in order, as a reader would run it."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import HANG_S, ROOT

PAGE = ROOT / "docs" / "first-hour.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def run_blocks(page: str, folder: Path) -> list[str]:
    """Save the page's files and run its commands in `folder`; return what each command printed.

    A block that begins with `# NAME` is the file NAME; one of bash is a command.
    """
    # The reader's environment is active, and `accbench` is that of this clone.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder)}
    printed = []
    for language, text in BLOCK.findall(page):
        if language != "bash":
            name = re.match(r"# (\S+)\n", text)
            assert name, f"a block of {language} names no file:\n{text}"
            (folder / name[1]).write_text(text)
            continue
        done = subprocess.run(
            ["bash", "-euc", text], cwd=folder, env=env, timeout=HANG_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        # Two short rounds judge nothing, and compare's status says so.
        allowed = (0, 1) if "accbench compare" in text else (0,)
        assert done.returncode in allowed, f"{text}\n{done.stdout}"
        printed.append(done.stdout)
    return printed


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")
def test_a_reader_gets_through_the_first_hour(tmp_path):
    images, compared, report, killed, resumed, exported, used = run_blocks(
        PAGE.read_text(), tmp_path
    )
    assert images == ""
    assert "numerics  jax: 2 steps" in compared
    assert "round 2/2  ddp: " in compared
    assert (tmp_path / "compared" / "report.html").exists()
    assert "trains the same" in report
    assert "exit status 75" in killed
    assert "going on from" in resumed
    assert "done: 640 steps" in resumed
    assert "stripes.safetensors" in exported
    assert "weights are loaded" in used
