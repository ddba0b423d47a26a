"""What to type where an optional package is missing; accbench itself is on no package index."""

import importlib.util
import shlex
import sys
from importlib import metadata
from pathlib import Path

_CLONE = Path(__file__).parents[1]


def install_command(extra: str) -> str:
    """A shell command that installs the extra `extra` of setup.py for the Python that runs this.

    From a clone it installs the clone; else accbench is installed already, and the
    command installs the packages that the extra adds to it.
    """
    if (_CLONE / "setup.py").is_file() and (_CLONE / "prepare.sh").is_file():
        return _pip("-e", f"{_CLONE}[{extra}]")
    try:
        return _pip(*sorted(_requirements("accbench", extra) - _requirements("accbench")))
    except metadata.PackageNotFoundError:  # its folder was copied to here
        return f"install accbench from its repository, with the extra [{extra}]"


def dependency_command(package: str, dependency: str) -> str:
    """A shell command that installs `dependency` in the version that `package` asks for."""
    asked = (line for line in _requirements(package) if line.startswith(dependency))
    return _pip(next(asked, dependency))


def without_paths(text: str) -> str:
    """`text` with commands of this module as they may be shown to others."""
    return text.replace(str(_CLONE), "CLONE").replace(shlex.quote(sys.executable), "python")


def _pip(*arguments: str) -> str:
    pip = [sys.executable, "-m", "pip", "install"]
    if importlib.util.find_spec("pip") is None:  # an environment made by uv
        pip = ["uv", "pip", "install", "--python", sys.executable]
    return shlex.join([*pip, *arguments])


def _requirements(package: str, extra: str = "") -> set[str]:
    """What an installed package needs on this machine, with one extra or without any."""
    from packaging.requirements import Requirement

    requirements = map(Requirement, metadata.requires(package) or ())
    return {
        f"{needed.name}{needed.specifier}"
        for needed in requirements
        if needed.marker is None or needed.marker.evaluate({"extra": extra})
    }
