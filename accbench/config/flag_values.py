"""Convert options written as text, in YAML, JSON or behind `--engines`, to command-line flags.

The option's declared type alone decides whether its text is a number, or means on or off. YAML
1.1 would guess that from the spelling: `off` becomes False and `1e-4` a string.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro
import yaml

from accbench.errors import RequestError

_BOOLEANS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
_YAML_NOT_FINITE = re.compile(r"[-+]?\.inf|\.nan", re.IGNORECASE)
_GUESSED_TAGS = ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")


class _TextLoader(yaml.SafeLoader):
    """A yaml.SafeLoader that keeps every scalar except null as text, and refuses repeated keys."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag in _GUESSED_TAGS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        _refuse_repeated(str(key.value) for key, _ in node.value)
        return node


def _refuse_repeated(keys: Iterable[str]) -> None:
    seen: set[str] = set()
    for key in keys:
        name = key.replace("-", "_")  # to a command line the same
        if name in seen:
            raise RequestError(f"the key {key!r} is there twice; keep one of them")
        seen.add(name)


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_repeated(key for key, _ in pairs)
    return dict(pairs)


def read(path: Path) -> Mapping[str, Any]:
    """Read the `flag: value` lines of a YAML or JSON file; values are text, null or nested.

    Raises:
        RequestError: the file cannot be read, holds something else, or has a key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = _parse_json(text) or yaml.load(text, Loader=_TextLoader)
    except OSError as error:
        raise RequestError(f"cannot read --config {path}: {error.strerror}") from None
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise RequestError(f"{path} is not {kind}: {' '.join(str(error).split())}") from None
    if not isinstance(content, Mapping):
        raise RequestError(f"{path} must hold `flag: value` lines, not {type(content).__name__}")
    return content


def _parse_json(text: str) -> Any | None:
    # For a run's config.json: JSON escapes characters beyond 16 bits in a way that YAML lacks.
    try:
        return json.loads(
            text, parse_int=str, parse_float=str, parse_constant=str, object_pairs_hook=_unrepeated
        )
    except json.JSONDecodeError:
        return None


def as_flags(values: Mapping[str, Any], flags_class: type) -> list[str]:
    """Convert `{"lr": 0.1, "ddp": {"channels_last": False}}` to `--lr=0.1 --ddp.no-channels_last`.

    None leaves a flag out, so that its default stands.

    Raises:
        RequestError: a switch has a value that is neither on nor off.
    """
    types = _declared_types(flags_class)
    flags: list[str] = []
    for name, value in _flatten(values):
        if value is not None:
            flags += _format_flag(name, value, types.get(name.replace("-", "_")))
    return flags


def _format_flag(name: str, value: Any, declared: Any) -> list[str]:
    if declared in (bool, _SwitchOn):
        meaning = _BOOLEANS.get(str(value).lower())
        if meaning is None:
            raise RequestError(f"--{name} is either on or off, not {str(value)!r}")
        if meaning:
            return [f"--{name}"]
        group, dot, last = name.rpartition(".")
        return [] if declared is _SwitchOn else [f"--{group}{dot}no-{last}"]
    if get_origin(declared) is Literal and {"on", "off"} <= {*get_args(declared)}:
        meaning = _BOOLEANS.get(str(value).lower())
        value = value if meaning is None else "on" if meaning else "off"
    if float in (declared, *get_args(declared)) and _YAML_NOT_FINITE.fullmatch(str(value)):
        value = value.replace(".", "")  # as Python spells it
    return [f"--{name}={value}"]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat += _flatten(value, f"{prefix}{key}.")
        else:
            flat.append((f"{prefix}{key}", value))
    return flat


class _SwitchOn:
    """The type of a flag that can only be given or left out."""


def _declared_types(flags_class: type, prefix: str = "") -> dict[str, Any]:
    """Return the declared type of each flag, named with its group's name before a dot."""
    types: dict[str, Any] = {}
    for name, declared in get_type_hints(flags_class, include_extras=True).items():
        if get_origin(declared) is Annotated:
            declared, *markers = get_args(declared)
            if tyro.conf.FlagCreatePairsOff in markers:
                declared = _SwitchOn
        if isinstance(declared, type) and dataclasses.is_dataclass(declared):
            types |= _declared_types(declared, f"{prefix}{name}.")
        elif declared is bool:
            types |= {f"{prefix}{name}": bool, f"{prefix}no_{name}": _SwitchOn}
        else:
            types[f"{prefix}{name}"] = declared
    return types
