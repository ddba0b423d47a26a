"""The names of a library's models, without the seconds that its import takes."""

import difflib
import re
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from accbench.errors import RequestError

# torchvision and timm register their models so, and name them by the function.
_REGISTERED = re.compile(r"^@register_model\b.*?^def (\w+)\(", re.MULTILINE | re.DOTALL)


@cache
def names(package: str, folder: str) -> tuple[str, ...]:
    """Names of the functions under `@register_model` in a folder of an installed package."""
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        return ()
    files = (Path(found.submodule_search_locations[0]) / folder).glob("*.py")
    texts = (file.read_text(encoding="utf-8") for file in files)
    return tuple(sorted({name for text in texts for name in _REGISTERED.findall(text)}))


def check(family: str, name: str, known: Iterable[str]) -> None:
    """Look whether a family has a model.

    Raises:
        RequestError: it has not; the message has the names that are closest.
    """
    known = list(known)
    if name in known:
        return
    close = difflib.get_close_matches(name, known, n=5, cutoff=0.4)
    there = f"the closest are {', '.join(close)}" if close else f"it has {len(known)} others"
    raise RequestError(f"{family} has no model {name!r}; {there}")
