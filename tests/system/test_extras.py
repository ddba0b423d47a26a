"""What is missing is told with a command that installs it from where accbench was started."""

import importlib.util
import shlex
import subprocess
import sys
from importlib import metadata
from importlib.machinery import PathFinder

import pytest

from accbench import cli
from tests.conftest import ROOT, run
from tests.pjrt.fake_cuda import make_driver


def check_command(line: str, extra: str) -> None:
    """The end of a message is what pip needs to install the clone with an extra."""
    command = shlex.split(line)[-6:]
    assert command == [sys.executable, "-m", "pip", "install", "-e", f"{ROOT}[{extra}]"]


@pytest.mark.parametrize(
    ("module", "flags", "extra"),
    [("torch_xla", ["--compiler-opt"], "xla"), ("jax", ["--engine=jax"], "jax"),
     ("s3fs", ["--data=s3://bucket/prefix"], "s3")],
)  # fmt: skip
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


@pytest.mark.parametrize(
    ("torch", "told"),
    [("2.15.0", " (installing it changes torch 2.15.0 to 2.8.0)"), ("2.8.0", ""),
     ("2.8.0+cu128", "")],
)  # fmt: skip
@pytest.mark.usefixtures("without_torch_xla")
def test_another_torch_is_told_before_it_comes(capsys, monkeypatch, torch, told):
    # Stands in for an environment with that torch.
    found = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: torch if name == "torch" else found(name))
    assert cli.run(["--compiler-opt"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"needs torch_xla, which is not installed{told}: " in line
    check_command(line, "xla")


@pytest.mark.usefixtures("without_torch_xla")
def test_python_that_torch_xla_is_not_there_for(capsys, monkeypatch):
    # Stands in for that Python.
    monkeypatch.setattr(sys, "version_info", (3, 14, 0, "final", 0))
    assert cli.run(["--compiler-opt"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("has no release for Python 3.14: make an environment with Python 3.13")


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


@pytest.mark.usefixtures("without_torch_xla")
def test_uv_installs_where_there_is_no_pip(capsys, monkeypatch):
    # Stands in for an environment that uv made.
    found = PathFinder.find_spec
    monkeypatch.setattr(
        PathFinder, "find_spec", lambda name, *rest: None if name == "pip" else found(name, *rest)
    )
    assert cli.run(["--compiler-opt"]) == 2
    assert f"uv pip install --python {sys.executable} -e" in capsys.readouterr().err
