"""Names on the command line to classes: `<folder>/<name>.py`, or a folder of that name whose
`__init__.py` has the class; found by scanning.

A package outside this repository adds to a kind through an entry point in the
group `accbench.<kind>`, for example `accbench.engines`.
"""

import ast
import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

from accbench.errors import RequestError


class Kind(NamedTuple):
    """A kind of plug-in."""

    package: str
    """Where its modules are."""
    class_name: str
    """The class that each of them defines."""
    title: str
    """What a person calls one."""


KINDS: Mapping[str, Kind] = {
    "engines": Kind("accbench.engines", "Engine", "engine"),
    "optimizers": Kind("accbench.engines.optimizers", "Optimizer", "optimizer"),
    "models": Kind("accbench.models", "Family", "model family"),
    "data": Kind("accbench.data.sources", "Source", "data source"),
    "launchers": Kind("accbench.launchers", "Launcher", "launcher"),
}


@cache
def modules(kind: str) -> dict[str, str]:
    """Return the plug-ins of a kind in this repository, name -> module, and import none of them.

    A module without the kind's class (a helper beside the plug-ins) is no plug-in.
    """
    package = importlib.import_module(KINDS[kind].package)
    return {
        info.name: f"{package.__name__}.{info.name}"
        for folder in package.__path__
        for info in pkgutil.iter_modules([folder])
        if _gives(Path(folder, info.name), f"{package.__name__}.{info.name}", KINDS[kind])
    }


def _gives(path: Path, module: str, kind: Kind) -> bool:
    """Whether the source text defines the kind's class, or imports it from below."""
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == kind.class_name:
            return True
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith(f"{module}.")
            and any(alias.name == kind.class_name for alias in node.names)
        ):
            return True
    return False


@cache
def classes(kind: str) -> dict[str, Any]:
    """Return all plug-ins of a kind, name -> class, sorted by name."""
    class_name = KINDS[kind].class_name
    found = {
        name: getattr(importlib.import_module(module), class_name)
        for name, module in modules(kind).items()
    }
    for entry_point in entry_points(group=f"accbench.{kind}"):
        found[entry_point.name] = entry_point.load()
    return dict(sorted(found.items()))


def load(kind: str, name: str) -> Any:
    """Return the class of the plug-in `name`.

    Raises:
        RequestError: there is none of that name; the message lists the right ones.
    """
    found = classes(kind)
    if name not in found:
        raise RequestError(f"unknown {KINDS[kind].title} {name!r}; there are: {', '.join(found)}")
    return found[name]
