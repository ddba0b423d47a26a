"""prepare.sh: which Python it takes, and what it says where none fits."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import HANG_S, ROOT

FOLDERS = [str(Path(sys.executable).parent), *os.environ["PATH"].split(os.pathsep)]
OLD_PYTHON = '#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1\nexit 1\n'


@pytest.fixture
def clone(tmp_path) -> Path:
    """A folder with prepare.sh and a path without a Python that fits."""
    (tmp_path / "bin").mkdir()
    for name in ("bash", "cat", "cksum", "dirname", "uname"):
        found = shutil.which(name)
        assert found
        (tmp_path / "bin" / name).symlink_to(found)
    (tmp_path / "accbench").mkdir()
    for name in ("prepare.sh", "setup.py", "pyproject.toml", "accbench/__init__.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def prepare(clone: Path, *flags: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [shutil.which("bash") or "bash", clone / "prepare.sh", "--no-data", *flags],
        env={"PATH": str(clone / "bin"), "HOME": str(clone), **env},
        capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip


def uv_that_runs_alone() -> str:
    """Return the first uv that needs no other program: a shim of pyenv's needs pyenv's path."""
    for path in filter(None, (shutil.which("uv", path=folder) for folder in FOLDERS)):
        done = subprocess.run([path, "--version"], env={"PATH": ""}, capture_output=True)
        if done.returncode == 0:
            return path
    pytest.skip("needs uv")


def test_without_a_python_that_fits(clone):
    program(clone / "bin" / "python3", OLD_PYTHON)
    for extras, newest in (("xla", 13), ("dev,xla-cuda12", 13), ("dev", 14), ("", 14)):
        done = prepare(clone, "--extras", extras)
        assert done.returncode == 2
        assert done.stderr == (
            f"prepare.sh: no Python 3.10 to 3.{newest} found; install one, or uv, which brings "
            "one, or activate an environment that has it\n"
        )


def test_environment_with_a_python_that_does_not_fit(clone):
    program(clone / "old" / "bin" / "python", OLD_PYTHON)
    done = prepare(clone, VIRTUAL_ENV=str(clone / "old"))
    assert done.returncode == 2
    assert done.stderr == (
        f"prepare.sh: {clone}/old has Python 3.9.1; accbench needs Python 3.10 to 3.14\n"
    )


@pytest.mark.parametrize("has_other_torch", [True, False])
def test_xla_beside_an_environment_of_a_newer_python(clone, has_other_torch):
    """Today's environment stays as it is; one made for torch_xla, whose Python is no use, not."""
    status = 0 if has_other_torch else 1
    text = (
        '#!/bin/sh\n[ "$1" = --version ] && echo Python 3.14.1\n'
        f'case "$2" in *metadata*) exit {status};; esac\nexit 1\n'
    )
    program(clone / "new" / "bin" / "python", text)
    done = prepare(clone, "--extras", "xla", VIRTUAL_ENV=str(clone / "new"))
    assert done.returncode == 2
    if has_other_torch:
        assert "no Python 3.10 to 3.13 found" in done.stderr
    else:
        assert f"{clone}/new has Python 3.14.1; accbench needs Python 3.10 to 3.13" in done.stderr


@pytest.mark.parametrize("extras", ["xla", "jax"])
def test_a_python_that_has_jax_comes_first(clone, extras):
    no_venv = '[ "$2" = venv ] && exit 1\nexit 0\n'
    of_python_3_10 = f'#!/bin/sh\ncase "$2" in *"(3, 11) <="*) exit 1;; esac\n{no_venv}'
    program(clone / "bin" / "python3", of_python_3_10)
    assert "cannot make .venv" in (alone := prepare(clone, "--extras", extras).stderr)
    assert " with python3;" in alone
    program(clone / "bin" / "python3.11", f"#!/bin/sh\n{no_venv}")
    assert " with python3.11;" in prepare(clone, "--extras", extras).stderr


def test_uv_finds_a_python(clone):
    # Installing takes a package index; what uv is asked to install is kept instead.
    venv = f'[ "$1" = venv ] && exec {uv_that_runs_alone()} "$@"'
    text = f'#!/bin/sh\n{venv}\necho "compiled:$UV_COMPILE_BYTECODE" "$@" >{clone}/asked\n'
    program(clone / "bin" / "uv", text)
    version = ".".join(map(str, sys.version_info[:3]))
    python = clone / "pythons" / f"cpython-{version}-linux-x86_64-gnu"
    python.mkdir(parents=True)
    for part in Path(sys.base_prefix).iterdir():
        (python / part.name).symlink_to(part)
    environment = {
        "UV_PYTHON_INSTALL_DIR": str(python.parent),
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_PYTHON_PREFERENCE": "only-managed",
    }
    done = prepare(clone, "--extras", "xla", **environment)
    assert done.returncode == 0, done.stderr
    python = clone / ".venv-xla" / "bin" / "python"
    assert (clone / "asked").read_text().split() == [
        "compiled:1", "pip", "install", "--quiet", "--python", str(python), "--editable", ".[xla]",
    ]  # fmt: skip
    found = subprocess.run([python, "--version"], capture_output=True, text=True, check=True)
    assert found.stdout == f"Python {version}\n"
    (clone / "asked").unlink()
    assert prepare(clone, "--extras", "xla", **environment).returncode == 0
    assert not (clone / "asked").exists()  # all is there
