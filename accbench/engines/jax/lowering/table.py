"""The table of functions that compute the operations of a captured graph.

A row's function takes the arguments of the operation's schema by their names: jax arrays (in the
logical order of axes that the graph has, NCHW), Python numbers, and jax dtypes where torch has
its own. It returns an array, or a tuple or list of them, of the shapes and dtypes that torch
gives. Arguments that only tell where a tensor lies (device, layout, memory_format, ...) are not
passed.

A package outside this repository adds rows, or replaces them, by decorating functions in a module
that an entry point of the group `accbench.lowerings` names.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

GROUP = "accbench.lowerings"


@dataclasses.dataclass(frozen=True)
class Row:
    """The function that computes one operation."""

    function: Callable[..., Any]
    context: bool
    """Whether the function takes the run's `context.Context` as its first argument."""
    pointwise: bool
    """Whether it works element by element: the order of axes does not matter if shapes agree."""


_rows: dict[str, Row] = {}


def lowering(
    *operations: str, context: bool = False, pointwise: bool = False
) -> Callable[[Function], Function]:
    """Decorate a function as the row of operations such as `aten.relu.default`.

    Args:
        *operations: namespace, operation and overload, each; the last to be registered holds.
        context: pass the run's context (random keys, rules) as the first argument.
        pointwise: the function works element by element, with broadcasting.

    Raises:
        ValueError: a name is not of that form.
    """
    for name in operations:
        if name.count(".") != 2:
            raise ValueError(f"{name!r} is no operation; one is named like 'aten.relu.default'")

    def register(function: Function) -> Function:
        for name in operations:
            _rows[name] = Row(function, context, pointwise)
        return function

    return register


def row(operation: str) -> Row | None:
    """Return the row of `aten.relu.default` and the like; None if there is none."""
    _load()
    return _rows.get(operation)


def operations() -> list[str]:
    """Return all operations that have a row, sorted."""
    _load()
    return sorted(_rows)


def all_rows_builtin() -> bool:
    """Return whether all rows are this package's own."""
    _load()
    return all(row.function.__module__.startswith("accbench.") for row in _rows.values())


@cache
def _load() -> None:
    """Import our modules of rows, then those of others, so that theirs replace ours."""
    package = importlib.import_module("accbench.engines.jax.lowering.rows")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    for entry_point in entry_points(group=GROUP):
        entry_point.load()
