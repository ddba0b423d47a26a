"""The table: which function computes an operation of a captured graph.

A row's function takes what the operation's schema names, by the same names: jax arrays (in the
logical order of axes that the graph has, NCHW), Python numbers, and jax dtypes where torch has
its own. It returns an array, or a tuple or list of them, of the shapes and dtypes that torch
gives. What only says where a tensor lies (device, layout, memory_format, ...) isn't passed.

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
    """How one operation is computed."""

    function: Callable[..., Any]
    context: bool
    """The function takes `accbench.engines.jax.lowering.context.Context` before all else."""
    pointwise: bool
    """Element by element, so that the order of axes doesn't matter where all shapes agree."""


_rows: dict[str, Row] = {}


def lowering(
    *operations: str, context: bool = False, pointwise: bool = False
) -> Callable[[Function], Function]:
    """Decorate a function as the row of operations such as `aten.relu.default`.

    Args:
        operations: namespace, operation and overload, each; the last to be registered holds.
        context: pass the run's context (random keys, rules) as the first argument.
        pointwise: the function works element by element, with broadcasting.

    Raises:
        ValueError: a name isn't of that form.
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
    """The row of `aten.relu.default` and the like; None if there is none."""
    _load()
    return _rows.get(operation)


def operations() -> list[str]:
    """All operations that have a row, sorted."""
    _load()
    return sorted(_rows)


def is_own() -> bool:
    """Whether all rows are of this package."""
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
