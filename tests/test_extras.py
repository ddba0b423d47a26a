"""What is missing is told with a command that installs it from where accbench was started."""

import importlib.util
import shlex
import sys

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
    [("torch_xla", ["--compiler-opt"], "xla"), ("s3fs", ["--data=s3://bucket/prefix"], "s3")],
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
    # Stands in for an environment that uv made.
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in ("pip", "torch_xla") else found(name),
    )
    assert cli.run(["--compiler-opt"]) == 2
    assert f"uv pip install --python {sys.executable} -e" in capsys.readouterr().err
