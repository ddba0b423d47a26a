"""A flag is one field: its default, help, range and scope stand together."""

import dataclasses
import os
from typing import Any

from accbench.errors import RequestError


def flag(
    default: Any, help_text: str, *, minimum: float | None = None, maximum: float | None = None,
    of_scripts: bool = True, is_path: bool = False,
) -> Any:  # fmt: skip
    """Declare a field of a dataclass of flags.

    Args:
        default: the value without the flag; immutable.
        help_text: what `--help` says.
        minimum: the smallest value allowed; None for no limit.
        maximum: the largest value allowed; None for no limit.
        of_scripts: whether it means something for `--script` and `accbench.accelerate`.
        is_path: whether `~/` at its start, or after its last colon, is the user's home.
    """
    facts = {"minimum": minimum, "maximum": maximum, "of_scripts": of_scripts, "is_path": is_path}
    return dataclasses.field(default=default, metadata={"help": help_text, **facts})


def names_with(flags_class: type, **facts: Any) -> tuple[str, ...]:
    """Return the names of the fields declared with these facts."""
    return tuple(
        field.name
        for field in dataclasses.fields(flags_class)
        if all(field.metadata.get(fact) == value for fact, value in facts.items())
    )


def expand_home(flag_name: str, value: str | None) -> str | None:
    """Return a path with the user's home in place of `~/`.

    A shell does not replace `~/` after `=`, nor does a YAML file.

    Raises:
        RequestError: the user has no home.
    """
    name, colon, path = (value or "").rpartition(":")
    if not path.startswith("~/"):
        return value
    expanded = os.path.expanduser(path)
    if not os.path.isabs(expanded):
        raise RequestError(f"{flag_name} {value}: HOME is not set; name the path in full")
    return f"{name}{colon}{expanded}"


def expand_homes(values: Any, prefix: str = "") -> Any:
    """Return a dataclass of flags with the user's home in place of `~/` in every path.

    Args:
        values: an instance.
        prefix: prefix of the names in the message, such as `xla.`.

    Raises:
        RequestError: the user has no home.
    """
    if not dataclasses.fields(values):
        return values
    return dataclasses.replace(
        values,
        **{
            name: expand_home(f"--{prefix}{name}", getattr(values, name))
            for name in names_with(type(values), is_path=True)
        },
    )


def check_ranges(values: Any, prefix: str = "") -> None:
    """Check each value of a dataclass of flags against its range.

    Args:
        values: an instance.
        prefix: prefix of the names in the message, such as `synthetic.`.

    Raises:
        RequestError: a value is outside of its range, or not a number.
    """
    # Plug-ins that do not use `flag` declare ranges as class variables.
    minima, maxima = getattr(values, "minimum", {}), getattr(values, "maximum", {})
    for field in dataclasses.fields(values):
        value = getattr(values, field.name)
        if value is None:
            continue
        minimum = field.metadata.get("minimum", minima.get(field.name))
        maximum = field.metadata.get("maximum", maxima.get(field.name))
        # Written so that NaN fails the check as well.
        if minimum is not None and not value >= minimum:
            raise RequestError(f"--{prefix}{field.name} must be at least {minimum:g}, not {value}")
        if maximum is not None and not value <= maximum:
            raise RequestError(f"--{prefix}{field.name} must be at most {maximum:g}, not {value}")
