"""What is missing is told with a command that installs it from where accbench was started."""

import importlib.util
import os
import shlex
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from accbench import cli
from accbench.system import extras
from tests.conftest import ROOT, run
from tests.pjrt.fake_cuda import make_driver


def check_command(line: str, extra: str) -> None:
    """The end of a message is what pip needs to install the clone with an extra."""
    command = shlex.split(line)[-6:]
    assert command == [sys.executable, "-m", "pip", "install", "-e", f"{ROOT}[{extra}]"]


@pytest.fixture(autouse=True)
def _without_other_environments(monkeypatch):
    # As in a clone where torch_xla's environment has not been made.
    monkeypatch.setattr(extras, "xla_python", lambda: None)


@pytest.mark.parametrize(
    ("module", "flags", "extra"),
    [("jax", ["--engine=jax"], "jax"), ("s3fs", ["--data=s3://bucket/prefix"], "s3")],
)
def test_clone_is_installed_with_the_extra(capsys, monkeypatch, module, flags, extra):
    # Stands in for an environment without the package.
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == module else found(name)
    )
    assert cli.run(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    check_command(line, extra)


def test_setuptools_is_imported_after_a_command_was_told():
    code = "from accbench.system import extras; extras.install_command('xla'); import setuptools"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def without_torch_xla(monkeypatch):
    # Stands in for an environment without the package.
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch_xla" else found(name)
    )


@pytest.mark.usefixtures("without_torch_xla")
def test_torch_xla_gets_an_environment_of_its_own(capsys):
    assert cli.run(["--compiler-opt"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "needs torch_xla, which is not installed: " in line
    assert shlex.split(line)[-4:] == ["bash", f"{ROOT}/prepare.sh", "--extras", "xla"]


@pytest.mark.usefixtures("without_torch_xla")
def test_a_process_that_cannot_restart_names_the_other_python(capsys, monkeypatch):
    monkeypatch.setattr(extras, "xla_python", lambda: Path("/clone/.venv-xla/bin/python"))
    assert cli.run(["--compiler-opt"]) == 2  # pytest's own command line is another
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("start this with /clone/.venv-xla/bin/python, which has it")


@pytest.mark.parametrize(
    "command",
    [["run", "--compiler-opt", "--max_steps=1"],
     ["compare", "--engines", "ddp,xla:lean=on", "--repeats=2"]],
)  # fmt: skip
def test_a_command_restarts_in_torch_xlas_environment(tmp_path, command):
    # Stands in for the other environment's Python: it prints what it was started with.
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    code = (
        "import importlib.util as u; find = u.find_spec; "
        "u.find_spec = lambda name: None if name == 'torch_xla' else find(name); "
        "from accbench import cli; import sys; sys.exit(cli.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "ACCBENCH_XLA_PYTHON": str(python)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    notice = f"engine xla has an environment of its own: continuing with {python}"
    assert done.stderr.splitlines()[-1] == notice
    assert done.stdout.split()[-len(command) :] == command


@pytest.mark.usefixtures("without_torch_xla")
def test_an_environment_that_lacks_torch_xla_itself_is_not_started_again(capsys, monkeypatch):
    """An installation of it that was cut off, say: it would start itself for ever."""
    monkeypatch.setenv("ACCBENCH_XLA_PYTHON", sys.executable)
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "--compiler-opt"])
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("it started itself"))
    assert cli.run(["--compiler-opt"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "needs torch_xla, which is not installed: " in line


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs torch_xla")
def test_gpu_without_the_plugin(tmp_path, monkeypatch):
    # A package of the same name and without the plugin, found before the one that is installed.
    (tmp_path / "jax_plugins").mkdir()
    (tmp_path / "jax_plugins" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(make_driver(tmp_path, num_gpus=1)))
    result = run("--engine=xla", "--device=cuda", "--data=synthetic")
    assert result.returncode == 2
    command, how_else = result.stderr.strip().split(", or use ")
    check_command(command, "xla-cuda12")
    assert how_else == "--device cpu to train on the CPU"


def test_uv_installs_where_there_is_no_pip(capsys, monkeypatch):
    # Stands in for an environment that uv made, without JAX.
    found, found_spec = PathFinder.find_spec, importlib.util.find_spec
    monkeypatch.setattr(
        PathFinder, "find_spec", lambda name, *rest: None if name == "pip" else found(name, *rest)
    )
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "jax" else found_spec(name)
    )
    assert cli.run(["--engine=jax"]) == 2
    assert f"uv pip install --python {sys.executable} -e" in capsys.readouterr().err
