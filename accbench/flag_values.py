"""Options written as text, in YAML, in JSON or behind `--engines`, to command-line flags.

Which of them are numbers, and which mean on or off, is known from the option's declared type
alone. YAML 1.1 would guess it from the spelling: `off` becomes False and `1e-4` a string.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro
import yaml

from accbench.errors import RequestError

_BOOLEANS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
_YAML_NOT_FINITE = re.compile(r"[-+]?\.inf|\.nan", re.IGNORECASE)
_GUESSED_TAGS = ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")


class _AsWritten(yaml.SafeLoader):
    """yaml.safe_load, but what is neither null nor a collection stays the text that it is."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag in _GUESSED_TAGS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def read(path: Path) -> Mapping[str, Any]:
    """The `flag: value` lines of a YAML or JSON file; values are text, null or nested.

    Raises:
        RequestError: the file cannot be read, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = _json(text) or yaml.load(text, Loader=_AsWritten)
    except OSError as error:
        raise RequestError(f"cannot read --config {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise RequestError(f"{path} is not {kind}: {' '.join(str(error).split())}") from None
    if not isinstance(content, Mapping):
        raise RequestError(f"{path} must hold `flag: value` lines, not {type(content).__name__}")
    return content


def _json(text: str) -> Any | None:
    # A run's config.json: JSON spells characters beyond 16 bits in a way that is not YAML's.
    try:
        return json.loads(text, parse_int=str, parse_float=str, parse_constant=str)
    except json.JSONDecodeError:
        return None


def as_flags(values: Mapping[str, Any], flags_class: type) -> list[str]:
    """`{"lr": 0.1, "ddp": {"channels_last": False}}` -> `--lr=0.1 --ddp.no-channels_last`.

    None leaves a flag out, so that its default stands.

    Raises:
        RequestError: a value is neither on nor off where it must be one of them.
    """
    types = _types(flags_class)
    flags: list[str] = []
    for name, value in _flat(values):
        if value is not None:
            flags += _flag(name, value, types.get(name.replace("-", "_")))
    return flags


def _flag(name: str, value: Any, declared: Any) -> list[str]:
    if declared in (bool, _OneWay):
        meaning = _BOOLEANS.get(str(value).lower())
        if meaning is None:
            raise RequestError(f"--{name} is either on or off, not {str(value)!r}")
        if meaning:
            return [f"--{name}"]
        group, dot, last = name.rpartition(".")
        return [] if declared is _OneWay else [f"--{group}{dot}no-{last}"]
    if get_origin(declared) is Literal and {"on", "off"} <= {*get_args(declared)}:
        meaning = _BOOLEANS.get(str(value).lower())
        value = value if meaning is None else "on" if meaning else "off"
    if float in (declared, *get_args(declared)) and _YAML_NOT_FINITE.fullmatch(str(value)):
        value = value.replace(".", "")  # as Python spells it
    return [f"--{name}={value}"]


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat += _flat(value, f"{prefix}{key}.")
        else:
            flat.append((f"{prefix}{key}", value))
    return flat


class _OneWay:
    """The type of a flag that can only be given or left out."""


def _types(flags_class: type, prefix: str = "") -> dict[str, Any]:
    """Flag, with its group's name before a dot -> its declared type."""
    types: dict[str, Any] = {}
    for name, declared in get_type_hints(flags_class, include_extras=True).items():
        if get_origin(declared) is Annotated:
            declared, *markers = get_args(declared)
            if tyro.conf.FlagCreatePairsOff in markers:
                declared = _OneWay
        if isinstance(declared, type) and dataclasses.is_dataclass(declared):
            types |= _types(declared, f"{prefix}{name}.")
        elif declared is bool:
            types |= {f"{prefix}{name}": bool, f"{prefix}no_{name}": _OneWay}
        else:
            types[f"{prefix}{name}"] = declared
    return types
