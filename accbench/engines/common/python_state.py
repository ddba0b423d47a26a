"""Python state that a captured step depends on: attributes, globals, functions and hooks.

A graph has a model's attributes, and globals that its code reads, as they were when it was
captured. Code that keeps such a graph checks here before each step whether they still are.
"""

import argparse
import collections
import enum
import functools
import inspect
import itertools
import operator
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

PythonState = dict[str, Any]
"""Name -> value, in a form that can be compared."""

_SIMPLE = (
    bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Size,
)  # fmt: skip
_CONTAINERS = (*_SIMPLE, list, tuple, dict, set)
_HOOKS = (
    "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks",
)  # fmt: skip
# A module's own attributes, which engines watch themselves, or which are no part of a step.
MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) | {"_compiled_call_impl", "forward"}
# Limits: depth of nested containers and objects, their length, the number of functions that a model
# calls and that are read, and the size of an array.
MAX_DEPTH, _MAX_ITEMS, _MAX_FUNCTIONS, _MAX_BYTES = 4, 1000, 2000, 4096
_MAX_KINDS = 1000  # classes about which something is remembered
_OPAQUE = "object"  # compared by identity alone
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_OPAQUE_KINDS = (type, nn.Module, types.ModuleType, torch.Tensor, np.ndarray, *GENERATORS)
# Packages whose globals hold no state of a model.
_LIBRARIES = frozenset(
    {"torch", "torchvision", "torch_xla", "jax", "numpy", "accbench", "builtins"}
)
# Of the standard library's classes, those whose attributes are a model's settings.
_SETTINGS = (types.SimpleNamespace, argparse.Namespace)


class PythonStateWatch:
    """Watches the Python state that one model's step depends on.

    Args:
        model: all of its modules are watched.
        functions: others that a step calls, such as the loss.
    """

    def __init__(self, model: nn.Module, functions: Iterable[Any] = ()) -> None:
        self.model = model
        functions = [*functions]
        self._owners = [
            owner for f in functions
            if (owner := f if _is_callable_object(f) else getattr(f, "__self__", None))
        ]  # fmt: skip
        kinds = {type(module) for module in model.modules()}
        self._read_outside = [*_names_read(kinds, functions)]
        self._classes = [
            *{base: None for kind in kinds for base in kind.__mro__ if _is_user_class(base)}
        ]
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._glance: _Glance | None = None
        self._last = -1
        self._states: tuple[PythonState, PythonState] = {}, {}

    def state(self) -> PythonState:
        """Return the current state, comparable."""
        frozen = Freezer()
        state: PythonState = {}
        for name, module in self.model.named_modules():
            prefix = f"{name}." if name else ""
            for key, value in vars(module).items():
                if key not in MODULE_ATTRIBUTES:
                    state[prefix + key] = frozen.freeze(value)
                elif value and key in _HOOKS:
                    state[prefix + key] = tuple(map(id, value.values()))
            state[f"{prefix}forward"] = _OPAQUE, id(module), id(vars(module).get("forward"))
        for owner in self._owners:
            state[type(owner).__name__] = frozen.freeze(owner)
        for kind in self._classes:
            for key, value in vars(kind).items():
                if isinstance(value, _SIMPLE) and not key.startswith("__"):
                    state[f"{kind.__qualname__}.{key}"] = frozen.freeze(value)
        outside = [(name, read()) for name, read in self._read_outside]
        for name, value in outside:  # all are alive, or another would get the same id
            state[name] = frozen.freeze(value)
        return state

    @property
    def changed(self) -> list[str]:
        """The names of what differs between the last two states that `state_id` has met."""
        return changes(*self._states)

    def _others(self) -> list[Any]:
        return [*self._owners, *(read() for _, read in self._read_outside)]

    def generators(self) -> list[Any]:
        """Return the generators of random numbers that are globals or closure variables."""
        return [value for _, read in self._read_outside if isinstance(value := read(), GENERATORS)]

    def state_id(self) -> int:
        """Return the state's id, the same each time that the state is the same."""
        if self._glance is None or not self._glance.is_the_same():
            state = self.state()
            if self._glance is None:
                self._states = state, state
            elif state != self._states[1]:
                self._states = self._states[1], state
            self._last = self._numbers.setdefault(tuple(state.items()), len(self._numbers))
            self._glance = _Glance(self.model, self._classes, self._others)
        return self._last


class _Glance:
    """Tells in a fraction of a millisecond that nothing has changed since it was made."""

    def __init__(
        self, model: nn.Module, classes: Iterable[type], outer: Callable[[], list[Any]]
    ) -> None:
        modules = [*model.modules()]
        self._held: list[Any] = [vars(module) for module in modules]
        self._held += [module._modules for module in modules] + [vars(kind) for kind in classes]
        hook_ids = [vars(module)[name] for module in modules for name in _HOOKS]
        self._held += hook_ids
        self._values = [(held, [*held.values()]) for held in self._held if held]
        self._lengths = [*map(len, self._held)]
        self._read_outside = outer
        self._mutable = [
            value
            for module in modules
            for key, value in vars(module).items()
            if key not in MODULE_ATTRIBUTES and _can_change(value)
        ]
        self._frozen = self._freeze()

    def _freeze(self) -> list[Any]:
        frozen = Freezer()
        return [frozen.freeze(value) for value in (*self._mutable, *self._read_outside())]

    def is_the_same(self) -> bool:
        if [*map(len, self._held)] != self._lengths:
            return False
        for held, values in self._values:
            if any(map(operator.is_not, held.values(), values)):
                return False
        return self._freeze() == self._frozen


def hook_ids(model: nn.Module) -> list[int]:
    """Return a list that changes when a hook is added to a module or removed."""
    hook_dicts = (vars(module)[name] for module in model.modules() for name in _HOOKS)
    return [
        value for index, hooks_of_kind in enumerate(hook_dicts) if hooks_of_kind
        for value in (index, *map(id, hooks_of_kind.values()))
    ]  # fmt: skip


def _can_change(value: Any) -> bool:
    """Return whether a value is mutable."""
    if isinstance(value, tuple):
        return any(map(_can_change, value))
    if value is None or isinstance(value, _SIMPLE):
        return False
    if isinstance(value, (torch.Tensor, np.ndarray, itertools.count)):
        return True
    return parts_of(value) is not None or bool(_slots(value))


def changes(before: PythonState, after: PythonState) -> list[str]:
    """Return the names of what differs, new and removed ones included."""
    names = {**before, **after}
    return [name for name in names if before.get(name, names) != after.get(name, names)]


def numbers_in(state: PythonState) -> PythonState:
    """Return only the numbers of a state."""
    return {name: value[1] for name, value in state.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and value[0] in (bool, int, float)


class Freezer:
    """Converts values to a form that can be compared and hashed, each object once."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}

    def freeze(self, value: Any, depth: int = 0) -> Any:
        if value is None:
            return None
        if isinstance(value, _SIMPLE):
            # With the type, for 1 == True; by repr, for NaN != NaN.
            return type(value), value if value == value else repr(value)
        key = id(value)
        if key not in self._known:
            self._known[key] = _OPAQUE, key  # for cycles
            self._known[key] = self._nested(value, depth)
        return self._known[key]

    def _nested(self, value: Any, depth: int) -> Any:
        if isinstance(value, torch.Tensor):
            return _OPAQUE, id(value), 0 if value.is_inference() else value._version
        if _is_small_array(value):
            return str(value.dtype), value.shape, value.tobytes()
        if isinstance(value, enum.Enum):
            return type(value), value.name
        if isinstance(value, itertools.count):
            return int, repr(value)
        inner = parts_of(value)
        if inner is None and _slots(value):
            return _OPAQUE, id(value), self._plain_slots(value, depth)
        if inner is None or depth == MAX_DEPTH or len(inner) > _MAX_ITEMS:
            return _OPAQUE, id(value), 0 if inner is None else len(inner)
        if isinstance(inner, (set, frozenset)):
            return type(value), frozenset(self.freeze(item, depth + 1) for item in inner)
        if isinstance(inner, dict):
            inner = [item for pair in inner.items() for item in pair]
        return type(value), tuple(self.freeze(item, depth + 1) for item in inner)

    def _plain_slots(self, value: Any, depth: int) -> Any:
        # Tensors that tracing leaves there are not undone, and would be new ones each time.
        if depth == MAX_DEPTH:
            return None
        values = [getattr(value, name, None) for name in _slots(value)]
        frozen = [self.freeze(item, depth + 1) for item in values]
        return tuple(item if is_plain(item) else _OPAQUE for item in frozen)


def _is_small_array(value: Any) -> bool:
    return isinstance(value, np.generic) or (
        isinstance(value, np.ndarray) and value.nbytes <= _MAX_BYTES and not value.dtype.hasobject
    )


def parts_of(value: Any) -> Any:
    """Return the container of a value's parts; None if it is treated as one object."""
    if isinstance(value, (list, tuple, collections.deque, set, frozenset, dict)):
        return value
    if isinstance(value, _OPAQUE_KINDS):
        return None
    if isinstance(value, enum.Enum) or (callable(value) and not _is_callable_object(value)):
        return None
    return getattr(value, "__dict__", None)


def _is_callable_object(value: Any) -> bool:
    """Return whether a value is of a user's class that defines `__call__` and no module."""
    kind: Any = type(value)
    return _defines_call(kind)


@functools.lru_cache(_MAX_KINDS)
def _defines_call(kind: type) -> bool:
    return (
        isinstance(getattr(kind, "__call__", None), types.FunctionType)  # noqa: B004
        and not issubclass(kind, (type, nn.Module))
        and _has_users_state(kind)
    )


def _has_users_state(kind: type) -> bool:
    """Return whether objects of a class may hold state of a model's own."""
    is_of_python = kind.__module__.partition(".")[0] in sys.stdlib_module_names
    return kind in _SETTINGS or (_is_user_class(kind) and not is_of_python)


def _slots(value: Any) -> list[str]:
    """Return the names of an object's slots, if it is of a user's class and has no more."""
    kind: Any = type(value)
    return _slots_of(kind)


@functools.lru_cache(_MAX_KINDS)
def _slots_of(kind: type) -> list[str]:
    if kind.__dictoffset__ or not _has_users_state(kind):
        return []
    slots = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    return [n for names in slots for n in ([names] if isinstance(names, str) else names)]


def is_plain(frozen: Any) -> bool:
    """Return whether a value's frozen form has no tensor, function or other object in it."""
    if isinstance(frozen, tuple):
        return frozen[:1] != (_OPAQUE,) and all(map(is_plain, frozen))
    return not isinstance(frozen, frozenset) or all(map(is_plain, frozen))


def _is_user_class(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in _LIBRARIES


def _names_read(
    kinds: Iterable[type], functions: Iterable[Any]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield (name, how to read it) for globals and closure variables that a model's code reads."""
    seen: set[types.FunctionType] = set()
    waiting = [function for kind in kinds for function in _methods(kind)]
    waiting += filter(None, map(_function, functions))
    names: set[str] = set()
    while waiting and len(seen) < _MAX_FUNCTIONS:
        function = waiting.pop()
        if function in seen or function.__module__.partition(".")[0] in _LIBRARIES:
            continue
        seen.add(function)
        for name, read in _reads_of(function):
            value = read()
            called = _function(value)
            if called is not None:
                waiting.append(called)
            elif name not in names and _is_watched(value):
                names.add(name)
                is_container = isinstance(value, _CONTAINERS)
                yield name, read if is_container else functools.partial(_read_plain, read)


def _is_watched(value: Any) -> bool:
    """Return whether a global or closure variable is watched: a library's and code are not."""
    kinds = (*_CONTAINERS, *GENERATORS, itertools.count)
    return value is None or isinstance(value, kinds) or _is_object(value)


def _is_object(value: Any) -> bool:
    return (
        isinstance(getattr(value, "__dict__", None), dict)
        and not isinstance(value, (*_CONTAINERS, *_OPAQUE_KINDS))
        and _has_users_state(type(value))
    )


def _read_plain(read: Callable[[], Any]) -> Any:
    """Read a variable; of an object only its numbers and strings, as it may be of any size."""
    value = read()
    if value is None or not _is_object(value) or len(vars(value)) > _MAX_ITEMS:
        return value
    return {name: item for name, item in vars(value).items() if isinstance(item, _SIMPLE)}


def _methods(kind: type) -> Iterator[types.FunctionType]:
    for base in filter(_is_user_class, kind.__mro__):
        for name, value in vars(base).items():
            if isinstance(value, types.FunctionType) and not name.startswith("__"):
                yield value


def _function(value: Any) -> types.FunctionType | None:
    """Return the Python function that calling this value runs."""
    while isinstance(value, functools.partial):
        value = value.func
    value = getattr(value, "__func__", value)
    value = inspect.unwrap(value) if callable(value) else value
    return value if isinstance(value, types.FunctionType) else None


def _reads_of(function: types.FunctionType) -> Iterator[tuple[str, Callable[[], Any]]]:
    codes = [function.__code__]
    for code in codes:  # nested functions, too
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        for name in code.co_names:
            if name in function.__globals__:
                yield f"{function.__module__}.{name}", _reader(function.__globals__, name)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        read = functools.partial(_content, cell)
        yield f"{function.__module__}.{function.__qualname__}.{name}", read


def _reader(namespace: dict[str, Any], name: str) -> Callable[[], Any]:
    return lambda: namespace.get(name)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
