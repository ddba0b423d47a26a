"""Flags from values that have their types already, as a run's `config.json` holds them.

A command line's parser takes a third of a second to check what was checked before, in each worker.
"""

import dataclasses
import json
import math
import types
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

_hints = cache(get_type_hints)


def read(path: Path) -> Any:
    """Return what a JSON file holds; None where it cannot be read, holds no JSON or a key twice."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)
    except (OSError, ValueError, RecursionError):
        return None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key is there twice")
    return values


def flags_of(flags_class: Any, values: Any) -> Any | None:
    """Return an instance of a dataclass of flags, if all values are known and of their types.

    None as a value leaves a flag out, as on a command line.

    Args:
        flags_class: a dataclass, in which dataclasses are groups of options.
        values: flag -> value, or -> a mapping of a group's options.

    Returns:
        The flags, or None if something does not fit, which a command line's parser can tell.
    """
    if not isinstance(values, Mapping):
        return None
    hints = _hints(flags_class)
    fitting: dict[str, Any] = {}
    for name, value in values.items():
        if name not in hints:
            return None
        if value is None:
            continue
        hint = hints[name]
        is_group = isinstance(hint, type) and dataclasses.is_dataclass(hint)
        fitting[name] = flags_of(hint, value) if is_group else _fitting(hint, value)
        if fitting[name] is None:
            return None
    try:
        return flags_class(**fitting)
    except TypeError:  # a flag without a default is missing
        return None


def _fitting(hint: Any, value: Any) -> Any | None:
    """Return a value as a declared type has it; None if it is of another."""
    kind = get_origin(hint)
    if kind is Annotated:
        return _fitting(get_args(hint)[0], value)
    if kind in (Union, types.UnionType):
        fitting = (_fitting(each, value) for each in get_args(hint))
        return next((one for one in fitting if one is not None), None)
    if kind is Literal:
        choices = [one for one in get_args(hint) if one == value and type(one) is type(value)]
        return choices[0] if choices else None
    if hint is float and type(value) in (int, float):
        return float(value) if math.isfinite(value) else None
    return value if hint in (bool, int, str) and type(value) is hint else None
