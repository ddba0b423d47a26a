"""Commands that install a missing optional package.

accbench itself is on no package index.
"""

import importlib.util
import os
import shlex
import sys
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

_CLONE = Path(__file__).parents[2]
# The last Python that torch 2.8 and torch_xla 2.8.1 have wheels for.
_LAST_PYTHON = {"xla": (3, 13), "xla-cuda12": (3, 13)}
_XLA_PYTHON = "ACCBENCH_XLA_PYTHON"


def xla_python() -> Path | None:
    """Return the Python of torch_xla's own environment, or None if there is none.

    It is the one that the variable ACCBENCH_XLA_PYTHON names, else that of the folder .venv-xla in
    the clone, which `prepare.sh --extras xla` makes. torch_xla needs torch 2.8, so that it cannot
    be installed beside today's. This process's own environment is no other, whatever it lacks.
    """
    named = os.environ.get(_XLA_PYTHON)
    python = Path(named) if named else _CLONE / ".venv-xla" / "bin" / "python"
    is_own = python.absolute().parent.parent.resolve() == Path(sys.prefix).resolve()
    return python if python.is_file() and not is_own else None


def python_with_torch_xla() -> Path | None:
    """Return the Python of torch_xla's own environment, if this one lacks torch_xla."""
    return None if importlib.util.find_spec("torch_xla") is not None else xla_python()


def install_command(extra: str) -> str:
    """Return a shell command that installs an extra of pyproject.toml for this Python.

    In a clone the command installs the clone. Elsewhere accbench is installed already, and the
    command installs the packages that the extra adds. Extras with torch_xla go into an environment
    of their own.
    """
    if _is_clone():
        if extra in _LAST_PYTHON and importlib.util.find_spec("torch_xla") is None:
            return shlex.join(["bash", str(_CLONE / "prepare.sh"), "--extras", extra])
        return _pip("-e", f"{_CLONE}[{extra}]")
    try:
        return _pip(*sorted(_requirements("accbench", extra) - _requirements("accbench")))
    except metadata.PackageNotFoundError:  # its folder was copied here
        return f"install accbench from its repository, with the extra [{extra}]"


def not_installed(package: str, extra: str) -> str:
    """Return `PACKAGE, which is not installed`, and how to install it or why that is impossible.

    The text also says if the installation changes torch, which other programs may use.
    """
    last = _LAST_PYTHON.get(extra)
    if last is not None and (python := xla_python()) is not None:
        return f"{package}, which is not installed here: start this with {python}, which has it"
    if last is not None and sys.version_info[:2] > last and not _is_clone():
        running, wanted = (".".join(map(str, version)) for version in (sys.version_info[:2], last))
        return (
            f"{package}, which is not installed and has no release for Python {running}: make an "
            f"environment with Python {wanted}"
        )
    change = "" if last is not None and _is_clone() else _change_of_torch(extra)
    return f"{package}, which is not installed{change}: {install_command(extra)}"


def _is_clone() -> bool:
    return (_CLONE / "pyproject.toml").is_file() and (_CLONE / "prepare.sh").is_file()


def _change_of_torch(extra: str) -> str:
    from packaging.requirements import Requirement

    try:
        installed = metadata.version("torch")
        requirements = map(Requirement, _requirements("accbench", extra))
    except metadata.PackageNotFoundError:
        return ""
    for specifier in (needed.specifier for needed in requirements if needed.name == "torch"):
        if not specifier.contains(installed, prereleases=True):
            return f" (installing it changes torch {installed} to {str(specifier).lstrip('=')})"
    return ""


def dependency_command(package: str, dependency: str) -> str:
    """Return a shell command that installs `dependency` in the version `package` asks for."""
    matches = (line for line in _requirements(package) if line.startswith(dependency))
    return _pip(next(matches, dependency))


def without_paths(text: str) -> str:
    """Replace the local paths in commands of this module, so that others may see `text`."""
    return text.replace(str(_CLONE), "CLONE").replace(shlex.quote(sys.executable), "python")


def _pip(*arguments: str) -> str:
    pip = [sys.executable, "-m", "pip", "install"]
    # Not importlib.util.find_spec: setuptools' finder, asked for pip, mistakes the process for pip
    # and then fails to import setuptools.
    if PathFinder.find_spec("pip") is None:  # an environment made by uv
        pip = ["uv", "pip", "install", "--python", sys.executable]
    return shlex.join([*pip, *arguments])


def _requirements(package: str, extra: str = "") -> set[str]:
    """Return the requirements of an installed package on this machine, with at most one extra."""
    from packaging.requirements import Requirement

    requirements = map(Requirement, metadata.requires(package) or ())
    return {
        f"{needed.name}{needed.specifier}"
        for needed in requirements
        if needed.marker is None or needed.marker.evaluate({"extra": extra})
    }
