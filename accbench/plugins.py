"""Names on the command line to classes: `accbench/<kind>/<name>.py`, or a folder of that name
whose `__init__.py` has the class; found by scanning.

A package outside this repository adds to a kind through an entry point in the
group `accbench.<kind>`, for example `accbench.engines`.
"""

import importlib
import pkgutil
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from accbench.errors import RequestError

# kind -> (the class that a file of this kind defines, what a person calls one)
KINDS = {
    "engines": ("Engine", "engine"),
    "models": ("Family", "model family"),
    "data": ("Source", "data source"),
    "launchers": ("Launcher", "launcher"),
}


@cache
def classes(kind: str) -> dict[str, Any]:
    """All plug-ins of a kind, name -> class, sorted by name.

    A module without the kind's class (a helper beside the plug-ins) is no plug-in.
    """
    class_name, _ = KINDS[kind]
    package = importlib.import_module(f"accbench.{kind}")
    found: dict[str, Any] = {}
    for module_info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"accbench.{kind}.{module_info.name}")
        plugin = getattr(module, class_name, None)
        # Not one that it imports from beside it, to build on.
        if plugin is not None and f"{plugin.__module__}.".startswith(f"{module.__name__}."):
            found[module_info.name] = plugin
    for entry_point in entry_points(group=f"accbench.{kind}"):
        found[entry_point.name] = entry_point.load()
    return dict(sorted(found.items()))


def load(kind: str, name: str) -> Any:
    """The class of the plug-in `name`.

    Raises:
        RequestError: there is none of that name; the message lists the right ones.
    """
    found = classes(kind)
    if name not in found:
        raise RequestError(f"unknown {KINDS[kind][1]} {name!r}; there are: {', '.join(found)}")
    return found[name]
