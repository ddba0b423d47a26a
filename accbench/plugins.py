"""Plug-ins by their names on the command line, found by scanning.

A plug-in is `accbench/<kind>/<name>.py`, or a folder of that name whose `__init__.py` has the
class. A package outside this repository adds to a kind through an entry point in the group
`accbench.<kind>`, for example `accbench.engines`.
"""

import importlib
import pkgutil
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from accbench.errors import RequestError

# kind -> (name of the class that a file of this kind defines, the kind in messages)
KINDS = {
    "engines": ("Engine", "engine"),
    "models": ("Family", "model family"),
    "data": ("Source", "data source"),
    "launchers": ("Launcher", "launcher"),
}


@cache
def classes(kind: str) -> dict[str, Any]:
    """Find all plug-ins of a kind, name -> class, sorted by name.

    A module without the kind's class (a helper beside the plug-ins) is no plug-in.
    """
    class_name, _ = KINDS[kind]
    package = importlib.import_module(f"accbench.{kind}")
    class_of_name: dict[str, Any] = {}
    for module_info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"accbench.{kind}.{module_info.name}")
        plugin = getattr(module, class_name, None)
        # Skip a class that the module only imports from another plug-in, to build on.
        if plugin is not None and f"{plugin.__module__}.".startswith(f"{module.__name__}."):
            class_of_name[module_info.name] = plugin
    for entry_point in entry_points(group=f"accbench.{kind}"):
        class_of_name[entry_point.name] = entry_point.load()
    return dict(sorted(class_of_name.items()))


def load(kind: str, name: str) -> Any:
    """Return the class of the plug-in `name`.

    Raises:
        RequestError: there is none of that name; the message lists the right ones.
    """
    available = classes(kind)
    if name not in available:
        raise RequestError(f"unknown {KINDS[kind][1]} {name!r}; there are: {', '.join(available)}")
    return available[name]
