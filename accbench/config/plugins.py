"""Plug-ins: names on the command line to classes, found by scanning folders.

A plug-in is `<folder>/<name>.py`, or a folder of that name whose `__init__.py` has the class. A
package outside this repository adds plug-ins through an entry point in the group `accbench.<kind>`,
for example `accbench.engines`.
"""

import importlib
import pkgutil
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

from accbench.errors import RequestError


class PluginKind(NamedTuple):
    """A kind of plug-in."""

    package: str
    """The package of its modules."""
    class_name: str
    """The class that each module defines."""
    title: str
    """Its name in messages."""


KINDS: Mapping[str, PluginKind] = {
    "engines": PluginKind("accbench.engines", "Engine", "engine"),
    "optimizers": PluginKind("accbench.engines.optimizers", "Optimizer", "optimizer"),
    "models": PluginKind("accbench.models", "Family", "model family"),
    "data": PluginKind("accbench.data.sources", "Source", "data source"),
    "launchers": PluginKind("accbench.launchers", "Launcher", "launcher"),
}


@cache
def modules(kind: str) -> dict[str, str]:
    """Return the plug-ins of a kind in this repository, name -> module, without importing them.

    A module without the kind's class (a helper beside the plug-ins) is not a plug-in.
    """
    package = importlib.import_module(KINDS[kind].package)
    return {
        info.name: f"{package.__name__}.{info.name}"
        for folder in package.__path__
        for info in pkgutil.iter_modules([folder])
        if _defines_plugin(Path(folder, info.name), f"{package.__name__}.{info.name}", KINDS[kind])
    }


def _defines_plugin(path: Path, module: str, kind: PluginKind) -> bool:
    """Return whether the source defines the kind's class, or imports it from a submodule."""
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    name, inside = kind.class_name, re.escape(module)
    imported = rf"from {inside}\.[\w.]+ import (\([^)]*|[^(\n]*)\b{name}\b"
    return bool(re.search(rf"^(class {name}\b|{imported})", source.read_text(), re.MULTILINE))


@cache
def _all_entry_points() -> Any:  # another type before Python 3.12
    """Return those of every installed package, whose files are read once and not for each kind."""
    return entry_points()


@cache
def classes(kind: str) -> dict[str, Any]:
    """Return all plug-ins of a kind, name -> class, sorted by name."""
    class_name = KINDS[kind].class_name
    plugins_by_name = {
        name: getattr(importlib.import_module(module), class_name)
        for name, module in modules(kind).items()
    }
    for entry_point in _all_entry_points().select(group=f"accbench.{kind}"):
        plugins_by_name[entry_point.name] = entry_point.load()
    return dict(sorted(plugins_by_name.items()))


def load(kind: str, name: str) -> Any:
    """Return the class of the plug-in `name`.

    Raises:
        RequestError: there is no such plug-in; the message lists those that exist.
    """
    plugins_by_name = classes(kind)
    if name not in plugins_by_name:
        raise RequestError(
            f"unknown {KINDS[kind].title} {name!r}; there are: {', '.join(plugins_by_name)}"
        )
    return plugins_by_name[name]
