"""Images carried as (N, *spatial, C) through a graph that speaks of (N, C, *spatial).

Under the rule `channels_last` a value of a graph may be a `ChannelsLast`: the array in the other
order of axes, with the shape that the graph knows. Rows registered by `channels_last` make and
take them; pointwise rows run on their arrays as they are; all else gets them put in order again.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from accbench.engines.jax.lowering.context import Context
from accbench.engines.jax.lowering.table import Function, Row

_rows: dict[str, Callable[..., Any]] = {}


@dataclasses.dataclass(frozen=True)
class ChannelsLast:
    """An array (N, *spatial, C) that stands for (N, C, *spatial)."""

    array: Any

    @property
    def shape(self) -> tuple[int, ...]:
        n, *spatial, c = self.array.shape
        return (n, c, *spatial)

    @property
    def ndim(self) -> int:
        return self.array.ndim

    @property
    def size(self) -> int:
        return self.array.size

    @property
    def dtype(self) -> Any:
        return self.array.dtype


def channels_last(*operations: str) -> Callable[[Function], Function]:
    """Decorate what computes operations under the rule `channels_last`.

    The function takes the run's context and the row's arguments, in which any array may be a
    `ChannelsLast`. It returns NotImplemented for what the plain row is to compute.
    """

    def register(function: Function) -> Function:
        _rows.update(dict.fromkeys(operations, function))
        return function

    return register


def plain(value: Any) -> Any:
    """The array in the graph's order of axes."""
    if not isinstance(value, ChannelsLast):
        return value
    if math.prod(value.shape[2:]) == 1:
        return value.array.reshape(value.shape)
    return jnp.moveaxis(value.array, -1, 1)


def last(value: Any) -> Any:
    """The array with its channels last, for one of three axes or more."""
    if isinstance(value, ChannelsLast):
        return value.array
    if math.prod(value.shape[2:]) == 1:
        return value.reshape(value.shape[0], *value.shape[2:], value.shape[1])
    return jnp.moveaxis(value, 1, -1)


def axis_of(dim: int, ndim: int) -> int:
    """Where an axis of the graph's order is with channels last."""
    dim %= ndim
    return dim if dim == 0 else (ndim - 1 if dim == 1 else dim - 1)


def called(
    name: str, row: Row, context: Context, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """A row's result, whatever the order of axes of its arguments."""
    if context.rules.channels_last and name in _rows:
        result = _rows[name](context, *args, **kwargs)
        if result is not NotImplemented:
            return result
    first = (context,) if row.context else ()
    values = [*_flat(args), *_flat([*kwargs.values()])]
    carried = [v for v in values if isinstance(v, ChannelsLast)]
    if not carried:
        return row.function(*first, *args, **kwargs)
    ndim = max(v.ndim for v in values if hasattr(v, "ndim"))
    if row.pointwise and ndim == carried[0].ndim:
        moved = [_moved(v, ndim) for v in args]
        return ChannelsLast(row.function(*moved, **{k: _moved(v, ndim) for k, v in kwargs.items()}))
    return row.function(
        *first, *_each(plain, args), **dict(zip(kwargs, _each(plain, kwargs.values()), strict=True))
    )


def _moved(value: Any, ndim: int) -> Any:
    """An operand of a pointwise row: numbers and 0-d arrays as they are."""
    if not hasattr(value, "ndim") or value.ndim == 0:
        return value
    if not isinstance(value, ChannelsLast):
        value = value.reshape((1,) * (ndim - value.ndim) + value.shape)
    return last(value)


def _flat(args: Any) -> list[Any]:
    return [v for arg in args for v in (arg if isinstance(arg, list) else [arg])]


def _each(function: Callable[[Any], Any], args: Any) -> list[Any]:
    return [[function(v) for v in a] if isinstance(a, list) else function(a) for a in args]
