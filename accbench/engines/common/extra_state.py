"""Extra state of modules (`get_extra_state`) as JSON and tensors.

A checkpoint holds no pickle, so values are tensors, numbers, strings, bytes and None, and lists,
tuples and dicts of these. In JSON each value that is not one of JSON's own is a mapping with one
key, its kind.
"""

import collections
from typing import Any

import torch

from accbench.distributed import complex_numbers

SUFFIX = "_extra_state"  # torch's, of the keys in a state_dict
_ALLOWED = "tensors, numbers, strings, bytes, None, and lists, tuples and dicts of these"
_PLAIN = (bool, int, float, str, type(None))
_DICTS = {"dict": dict, "ordered": collections.OrderedDict}
_SEQUENCES = {"list": list, "tuple": tuple}
_MAX_DEPTH = 50  # of nesting; a value that holds itself has more


class NotPlainError(Exception):
    """A value is of a class that a checkpoint cannot hold; the message says which."""


def pack(value: Any, tensors: list[torch.Tensor], level: int = 0) -> Any:
    """Convert a value to JSON types; its tensors are appended to `tensors`.

    Args:
        value: to convert.
        tensors: appended to.
        level: how deep the value is nested.

    Raises:
        NotPlainError: it, or a value in it, is of a class that a checkpoint cannot hold.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return {
            "parameter" if isinstance(value, torch.nn.Parameter) else "tensor": len(tensors) - 1
        }
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if level == _MAX_DEPTH:
        raise NotPlainError(f"values nested more than {_MAX_DEPTH} deep")
    for name, container_class in _SEQUENCES.items():
        if kind is container_class:
            return {name: [pack(item, tensors, level + 1) for item in value]}
    for name, container_class in _DICTS.items():
        if kind is container_class:
            pairs = ((pack(k, tensors, level + 1), pack(v, tensors, level + 1))
                     for k, v in value.items())  # fmt: skip
            return {name: [[key, item] for key, item in pairs]}
    raise NotPlainError(f"a {kind.__module__}.{kind.__qualname__}")


def unpack(packed_value: Any, tensors: list[torch.Tensor]) -> Any:
    """Restore the value that `pack` converted, with these tensors in it.

    Raises:
        ValueError: this is nothing that `pack` returns.
    """
    if type(packed_value) in _PLAIN:
        return packed_value
    if not isinstance(packed_value, dict) or len(packed_value) != 1:
        raise ValueError(f"{packed_value!r} is no packed value")
    ((kind, content),) = packed_value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "parameter":
        return torch.nn.Parameter(tensors[content], requires_grad=False)
    if kind == "complex":
        return complex(*content)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](unpack(item, tensors) for item in content)
    if kind in _DICTS:
        return _DICTS[kind]((unpack(k, tensors), unpack(v, tensors)) for k, v in content)
    raise ValueError(f"{kind!r} is no kind of packed value")


def copy_to_host(value: Any, wide: bool = True) -> Any:
    """Return a copy whose tensors are on the host.

    Args:
        value: to copy.
        wide: keep float64, instead of converting it to float32.

    Raises:
        NotPlainError: as `pack`.
    """
    tensors: list[torch.Tensor] = []
    packed_value = pack(value, tensors)
    copies = [tensor.to("cpu", copy=True) for tensor in tensors]
    if not wide:
        copies = [t.float() if t.dtype is torch.float64 else t for t in copies]
    return unpack(packed_value, copies)


def copy_to_devices_of(value: Any, current: Any) -> Any:
    """Return a copy whose tensors are on the devices of the value that it replaces."""
    tensors: list[torch.Tensor] = []
    packed_value, current_tensors = pack(value, tensors), tensors_of(current)
    device_tensors = current_tensors if len(current_tensors) == len(tensors) else tensors
    copies = [
        tensor.to(like.device, copy=True)
        for tensor, like in zip(tensors, device_tensors, strict=True)
    ]
    return unpack(packed_value, copies)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value; none if it cannot be packed."""
    tensors: list[torch.Tensor] = []
    try:
        pack(value, tensors)
    except NotPlainError:
        return []
    return tensors


def equal(first: Any, second: Any) -> bool:
    """Return whether two values on the host are the same."""
    tensors: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    if pack(first, tensors[0]) != pack(second, tensors[1]):
        return False
    pairs = zip(*tensors, strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def split_numbers(value: Any) -> tuple[list[Any], torch.Tensor]:
    """Return a value's parts other than floats and tensors, and those as one vector, float64."""
    tensors: list[torch.Tensor] = []
    others: list[Any] = []
    vectors: list[torch.Tensor] = []

    def add(packed_value: Any) -> None:
        if isinstance(packed_value, float):
            vectors.append(torch.tensor([packed_value], dtype=torch.float64))
        elif isinstance(packed_value, (list, dict)):
            others.append([*packed_value] if isinstance(packed_value, dict) else len(packed_value))
            for item in packed_value.values() if isinstance(packed_value, dict) else packed_value:
                add(item)
        else:
            others.append(packed_value)

    add(pack(value, tensors))
    vectors += [complex_numbers.wide(tensor.cpu()).flatten() for tensor in tensors]
    return others, torch.cat([torch.zeros(0, dtype=torch.float64), *vectors])


def entry_problem(key: str, value: Any) -> str | None:
    """Return why no checkpoint can hold an entry of a state_dict; None if one can."""
    try:
        pack(value, [])
    except NotPlainError as error:
        module = key.removesuffix(SUFFIX).removesuffix(".")
        where = f"the extra state of module {module or 'the model'}"
        if not key.endswith(SUFFIX):
            where = f"{key} in the model's state_dict()"
        return f"{where} holds {error}, and a checkpoint holds {_ALLOWED}"
    return None
