"""The register of containers that a batch or a model's outputs may consist of.

Each kind defines the parts of a container and how to rebuild one of the same type from other parts,
so that moving, casting, splitting and tracing support the same kinds. Types registered with torch's
pytree (`torch.utils._pytree.register_pytree_node`) are supported through that.
"""

import copy
import dataclasses
import inspect
from collections import UserList, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree

from accbench.errors import RequestError

Parts = list[tuple[str, Any]]
"""(what is appended to the container's name to reach a part, the part)"""


@dataclasses.dataclass(frozen=True)
class ContainerKind:
    """A kind of container: how to recognize, take apart and rebuild it."""

    accepts: Callable[[Any], bool]
    parts: Callable[[Any], Parts]
    rebuilt: Callable[[Any, list[Any]], Any]
    """Rebuild a container of the same type and attributes from parts in the order of `parts`."""


# The parts of a packed sequence that are on the device; its sizes are read on the host.
_OF_PACKED = ("data", "sorted_indices", "unsorted_indices")
# Classes whose objects consist of their attributes; by name, so that nothing is imported.
_OF_ATTRIBUTES = {
    "torch.distributions.distribution.Distribution",
    "torch.distributions.transforms.Transform",
    "transformers.cache_utils.Cache",
    "transformers.cache_utils.CacheLayerMixin",
}
# Types that are never searched for tensors.
_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, type, np.ndarray, np.generic, torch.dtype,
    torch.device, torch.Size, nn.Module, ModuleType,
)  # fmt: skip
_LEAVES = (torch.Tensor, *_PLAIN)
# How deep an object's attributes are searched for tensors.
_DEPTH = 5


def _packed_parts(nest: PackedSequence) -> Parts:
    return [(f".{name}", getattr(nest, name)) for name in _OF_PACKED]


def _packed(nest: PackedSequence, parts: list[Any]) -> Any:
    return PackedSequence(batch_sizes=nest.batch_sizes, **dict(zip(_OF_PACKED, parts, strict=True)))


def _named_parts(nest: Any) -> Parts:
    return [(f".{name}", part) for name, part in zip(nest._fields, nest, strict=True)]


def _named(nest: Any, parts: list[Any]) -> Any:
    return _with_attributes_of(nest, tuple.__new__(type(nest), parts))


def _sequence_parts(nest: Sequence[Any]) -> Parts:
    return [(f"[{index}]", part) for index, part in enumerate(nest)]


def _tuple(nest: Any, parts: list[Any]) -> Any:
    if hasattr(nest, "n_sequence_fields"):  # torch.return_types: tuple.__new__ would crash
        return type(nest)(parts)
    return _with_attributes_of(nest, tuple.__new__(type(nest), parts))


def _with_attributes_of(nest: Any, other: Any) -> Any:
    vars_of = getattr(nest, "__dict__", None)
    if vars_of:
        other.__dict__.update(vars_of)
    return other


def _list(nest: Any, parts: list[Any]) -> Any:
    same = copy.copy(nest)
    same[:] = parts
    return same


def _deque(nest: Any, parts: list[Any]) -> Any:
    same = copy.copy(nest)
    same.clear()
    same.extend(parts)
    return same


def _mapping_parts(nest: Mapping[Any, Any]) -> Parts:
    return [(f"[{key!r}]", part) for key, part in nest.items()]


def _mutable_mapping(nest: Any, parts: list[Any]) -> Any:
    same = _copy_mapping(nest)
    for key, part in zip([*nest], parts, strict=True):  # transformers' outputs have no update()
        same[key] = part
    return same


def _mapping(nest: Any, parts: list[Any]) -> Any:
    changed = dict(zip(nest, parts, strict=True))
    if type(nest) is MappingProxyType:
        return MappingProxyType(changed)
    try:
        same = type(nest)(changed)
    except TypeError as error:
        raise _refused(nest, "rebuilt with other tensors") from error
    return _with_missing_attributes(nest, same)


def _with_missing_attributes(nest: Any, same: Any) -> Any:
    for name, value in getattr(nest, "__dict__", {}).items():
        if name not in vars(same):
            object.__setattr__(same, name, value)
    return same


def _copy_mapping(nest: Any) -> Any:
    """Copy a mapping, and the attribute that holds its items if it has one."""
    same = copy.copy(nest)
    if isinstance(nest, dict) or hasattr(type(nest), "__copy__"):
        return same
    for name, value in getattr(nest, "__dict__", {}).items():
        if isinstance(value, (MutableMapping, list)) and vars(same).get(name) is value:
            object.__setattr__(same, name, copy.copy(value))
    return same


def _is_dataclass(nest: Any) -> bool:
    return dataclasses.is_dataclass(nest) and not isinstance(nest, type)


def _is_of_attributes(nest: Any) -> bool:
    kind = type(nest)
    return (
        isinstance(nest, SimpleNamespace)
        or hasattr(kind, "__attrs_attrs__")
        or any(f"{base.__module__}.{base.__qualname__}" in _OF_ATTRIBUTES for base in kind.__mro__)
    )


def _attribute_names(nest: Any) -> list[str]:
    declared = [field.name for field in dataclasses.fields(nest)] if _is_dataclass(nest) else []
    declared += [attribute.name for attribute in getattr(type(nest), "__attrs_attrs__", ())]
    names = dict.fromkeys([*declared, *getattr(nest, "__dict__", {})])
    return [name for name in names if hasattr(nest, name)]


def _attribute_parts(nest: Any) -> Parts:
    return [(f".{name}", getattr(nest, name)) for name in _attribute_names(nest)]


def _of_attributes(nest: Any, parts: list[Any]) -> Any:
    names = _attribute_names(nest)
    before = [tensor for name in names for _, tensor in held(getattr(nest, name))]
    after = [tensor for part in parts for _, tensor in held(part)]
    if not _is_dataclass(nest) and [*map(id, before)] == [*map(id, after)]:
        return nest  # the same object, which may have state beyond its attributes
    same = copy.copy(nest)
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(same, name, part)  # works for frozen ones, too
    return same


def _registered_parts(nest: Any) -> Parts:
    node = _pytree.SUPPORTED_NODES[type(nest)]
    return [(f"[{index}]", part) for index, part in enumerate(node.flatten_fn(nest)[0])]


def _registered(nest: Any, parts: list[Any]) -> Any:
    node = _pytree.SUPPORTED_NODES[type(nest)]
    return node.unflatten_fn(parts, node.flatten_fn(nest)[1])


def _is_registered(nest: Any) -> bool:
    """Return whether pytree knows the type and it is none of those that have a kind here."""
    known = (tuple, list, dict, deque)
    return type(nest) in _pytree.SUPPORTED_NODES and not isinstance(nest, known)


KINDS = (
    ContainerKind(lambda n: isinstance(n, PackedSequence), _packed_parts, _packed),
    ContainerKind(lambda n: isinstance(n, tuple) and hasattr(n, "_fields"), _named_parts, _named),
    ContainerKind(lambda n: isinstance(n, tuple), _sequence_parts, _tuple),
    ContainerKind(lambda n: isinstance(n, (list, UserList)), _sequence_parts, _list),
    ContainerKind(lambda n: isinstance(n, deque), _sequence_parts, _deque),
    ContainerKind(_is_registered, _registered_parts, _registered),
    ContainerKind(lambda n: isinstance(n, MutableMapping), _mapping_parts, _mutable_mapping),
    ContainerKind(lambda n: isinstance(n, Mapping), _mapping_parts, _mapping),
    ContainerKind(_is_dataclass, _attribute_parts, _of_attributes),
    ContainerKind(_is_of_attributes, _attribute_parts, _of_attributes),
)
"""In the order in which they are tried."""


def find_kind(nest: Any) -> ContainerKind | None:
    """Return the container's kind; None for a tensor, and for what is not a known container."""
    if isinstance(nest, _LEAVES):
        return None
    return next((kind for kind in KINDS if kind.accepts(nest)), None)


def moves_itself(nest: Any) -> bool:
    """Return whether a container has its own `.to(device)`, and no kind that takes precedence.

    A dataclass or a mapping with a `.to` may store the device beside its tensors.
    """
    if isinstance(nest, _LEAVES) or not callable(getattr(nest, "to", None)):
        return False
    kind = find_kind(nest)
    return kind is None or kind.parts is _attribute_parts


def held(thing: Any, name: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in an object of no known kind, as (path below `name`, tensor)."""
    if isinstance(thing, torch.Tensor):
        yield name, thing
        return
    if isinstance(thing, _PLAIN) or not depth or inspect.isroutine(thing):
        return
    kind = find_kind(thing)
    parts = kind.parts(thing) if kind is not None else _attributes(thing)
    for path, part in parts:
        yield from held(part, f"{name}{path}", depth - 1)


def _attributes(thing: Any) -> Parts:
    slots = [
        name for base in type(thing).__mro__ for name in _names(getattr(base, "__slots__", ()))
    ]
    names = dict.fromkeys([*getattr(thing, "__dict__", {}), *slots])
    public = (name for name in names if not name.startswith("__"))
    return [(f".{name}", getattr(thing, name, None)) for name in public]


def _names(slots: Any) -> Sequence[str]:
    return [slots] if isinstance(slots, str) else [*slots]


def refuse_holder(thing: Any, doing: str) -> None:
    """Raise RequestError if an object of no known kind holds tensors.

    Args:
        thing: the object.
        doing: what cannot be done to its tensors, as in "moved to the device".
    """
    first = next(held(thing), None)
    if first is not None:
        raise _refused(thing, f"{doing}: it holds a tensor at {first[0]}")


def _refused(thing: Any, what: str) -> RequestError:
    kind = type(thing)
    return RequestError(
        f"a {kind.__module__}.{kind.__qualname__} cannot be {what}; make it a dataclass, a mapping "
        "or a sequence, or register it by torch.utils._pytree.register_pytree_node"
    )
