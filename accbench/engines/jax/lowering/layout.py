"""Images carried as (N, *spatial, C) through a graph whose order is (N, C, *spatial).

Under the rule `channels_last` a value of a graph may be a `ChannelsLast`: the array in the other
order of axes, with the shape that the graph knows. Rows registered by `channels_last` make and
take them. Pointwise rows run on their arrays unchanged. All other rows get arrays in the graph's
order.
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
    """Decorate a function that computes operations under the rule `channels_last`.

    The function takes the run's context and the row's arguments, in which any array may be a
    `ChannelsLast`. It returns NotImplemented for what the plain row is to compute.
    """

    def register(function: Function) -> Function:
        _rows.update(dict.fromkeys(operations, function))
        return function

    return register


def to_channels_first(value: Any) -> Any:
    """Return the array in the graph's order of axes."""
    if not isinstance(value, ChannelsLast):
        return value
    if math.prod(value.shape[2:]) == 1:
        return value.array.reshape(value.shape)
    return jnp.moveaxis(value.array, -1, 1)


def to_channels_last(value: Any) -> Any:
    """Return the array, of three axes or more, with its channels last."""
    if isinstance(value, ChannelsLast):
        return value.array
    if math.prod(value.shape[2:]) == 1:
        return value.reshape(value.shape[0], *value.shape[2:], value.shape[1])
    return jnp.moveaxis(value, 1, -1)


def channels_last_axis(dim: int, ndim: int) -> int:
    """Return where an axis of the graph's order is with channels last."""
    dim %= ndim
    return dim if dim == 0 else (ndim - 1 if dim == 1 else dim - 1)


def call_row(
    name: str, row: Row, context: Context, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Return a row's result, whatever the order of axes of its arguments."""
    if context.rules.channels_last and name in _rows:
        result = _rows[name](context, *args, **kwargs)
        if result is not NotImplemented:
            return result
    leading = (context,) if row.context else ()
    values = [*_flatten(args), *_flatten([*kwargs.values()])]
    images = [v for v in values if isinstance(v, ChannelsLast)]
    if not images:
        return row.function(*leading, *args, **kwargs)
    ndim = max(v.ndim for v in values if hasattr(v, "ndim"))
    if row.pointwise and ndim == images[0].ndim:
        operands = [_pointwise_operand(v, ndim) for v in args]
        return ChannelsLast(
            row.function(*operands, **{k: _pointwise_operand(v, ndim) for k, v in kwargs.items()})
        )
    return row.function(
        *leading,
        *_map(to_channels_first, args),
        **dict(zip(kwargs, _map(to_channels_first, kwargs.values()), strict=True)),
    )


def _pointwise_operand(value: Any, ndim: int) -> Any:
    """Return an operand of a pointwise row; numbers and 0-d arrays are unchanged."""
    if not hasattr(value, "ndim") or value.ndim == 0:
        return value
    if not isinstance(value, ChannelsLast):
        value = value.reshape((1,) * (ndim - value.ndim) + value.shape)
    return to_channels_last(value)


def _flatten(args: Any) -> list[Any]:
    return [v for arg in args for v in (arg if isinstance(arg, list) else [arg])]


def _map(function: Callable[[Any], Any], args: Any) -> list[Any]:
    return [[function(v) for v in a] if isinstance(a, list) else function(a) for a in args]
