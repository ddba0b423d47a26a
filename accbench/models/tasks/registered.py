"""Names of a library's registered models, read from its source instead of a slow import."""

import difflib
import re
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from accbench.errors import RequestError

# torchvision and timm register models with this decorator, under the function's name.
_REGISTERED = re.compile(r"^@register_model\b.*?^def (\w+)\(", re.MULTILINE | re.DOTALL)


@cache
def names(package: str, folder: str) -> tuple[str, ...]:
    """Return the functions with `@register_model` in a folder of an installed package."""
    package_spec = find_spec(package)
    if package_spec is None or not package_spec.submodule_search_locations:
        return ()
    files = (Path(package_spec.submodule_search_locations[0]) / folder).glob("*.py")
    texts = (file.read_text(encoding="utf-8") for file in files)
    return tuple(sorted({name for text in texts for name in _REGISTERED.findall(text)}))


def check(family: str, name: str, known: Iterable[str]) -> None:
    """Raise an error unless a family has a model.

    Raises:
        RequestError: the model is unknown; the message lists the closest names.
    """
    known = list(known)
    if name in known:
        return
    close = difflib.get_close_matches(name, known, n=5, cutoff=0.4)
    there = f"the closest are {', '.join(close)}" if close else f"it has {len(known)} others"
    raise RequestError(f"{family} has no model {name!r}; {there}")
