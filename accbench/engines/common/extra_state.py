"""What modules keep beside parameters and buffers (`get_extra_state`), as JSON and tensors.

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
_MOST_LEVELS = 50  # of nesting; a value that holds itself has more


class NotPlainError(Exception):
    """A value is of a class that a checkpoint cannot hold; the message says which."""


def packed(value: Any, tensors: list[torch.Tensor], level: int = 0) -> Any:
    """Return a value as JSON has it; its tensors are appended to `tensors`.

    Raises:
        NotPlainError: it, or a value in it, is of another class.
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
    if level == _MOST_LEVELS:
        raise NotPlainError(f"values nested more than {_MOST_LEVELS} deep")
    for name, own in _SEQUENCES.items():
        if kind is own:
            return {name: [packed(one, tensors, level + 1) for one in value]}
    for name, own in _DICTS.items():
        if kind is own:
            pairs = ((packed(k, tensors, level + 1), packed(v, tensors, level + 1))
                     for k, v in value.items())  # fmt: skip
            return {name: [[key, one] for key, one in pairs]}
    raise NotPlainError(f"a {kind.__module__}.{kind.__qualname__}")


def unpacked(found: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the value that `packed` was given, with these tensors in it.

    Raises:
        ValueError: this is nothing that `packed` gives.
    """
    if type(found) in _PLAIN:
        return found
    if not isinstance(found, dict) or len(found) != 1:
        raise ValueError(f"{found!r} is no packed value")
    ((kind, content),) = found.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "parameter":
        return torch.nn.Parameter(tensors[content], requires_grad=False)
    if kind == "complex":
        return complex(*content)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](unpacked(one, tensors) for one in content)
    if kind in _DICTS:
        return _DICTS[kind]((unpacked(k, tensors), unpacked(v, tensors)) for k, v in content)
    raise ValueError(f"{kind!r} is no kind of packed value")


def copied(value: Any, wide: bool = True) -> Any:
    """Return a copy whose tensors are on the host.

    Args:
        wide: leave float64 as it is, and do not make it float32.

    Raises:
        NotPlainError: as `packed`.
    """
    tensors: list[torch.Tensor] = []
    found = packed(value, tensors)
    copies = [tensor.to("cpu", copy=True) for tensor in tensors]
    if not wide:
        copies = [t.float() if t.dtype is torch.float64 else t for t in copies]
    return unpacked(found, copies)


def placed(value: Any, current: Any) -> Any:
    """Return a copy whose tensors are where those of the value are that it is to replace."""
    tensors: list[torch.Tensor] = []
    found, own = packed(value, tensors), tensors_of(current)
    places = own if len(own) == len(tensors) else tensors
    copies = [t.to(o.device, copy=True) for t, o in zip(tensors, places, strict=True)]
    return unpacked(found, copies)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value; none of what cannot be packed."""
    tensors: list[torch.Tensor] = []
    try:
        packed(value, tensors)
    except NotPlainError:
        return []
    return tensors


def equal(one: Any, other: Any) -> bool:
    """Return whether two values on the host are the same."""
    tensors: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    if packed(one, tensors[0]) != packed(other, tensors[1]):
        return False
    pairs = zip(*tensors, strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def numbers(value: Any) -> tuple[list[Any], torch.Tensor]:
    """Return what is in a value but its floats and tensors, and those in a row, float64."""
    tensors: list[torch.Tensor] = []
    others: list[Any] = []
    rows: list[torch.Tensor] = []

    def add(found: Any) -> None:
        if isinstance(found, float):
            rows.append(torch.tensor([found], dtype=torch.float64))
        elif isinstance(found, (list, dict)):
            others.append([*found] if isinstance(found, dict) else len(found))
            for one in found.values() if isinstance(found, dict) else found:
                add(one)
        else:
            others.append(found)

    add(packed(value, tensors))
    rows += [complex_numbers.wide(tensor.cpu()).flatten() for tensor in tensors]
    return others, torch.cat([torch.zeros(0, dtype=torch.float64), *rows])


def problem(key: str, value: Any) -> str | None:
    """Return a line on an entry of a state_dict that no checkpoint can hold; None if one can."""
    try:
        packed(value, [])
    except NotPlainError as error:
        module = key.removesuffix(SUFFIX).removesuffix(".")
        where = f"the extra state of module {module or 'the model'}"
        if not key.endswith(SUFFIX):
            where = f"{key} in the model's state_dict()"
        return f"{where} holds {error}, and a checkpoint holds {_ALLOWED}"
    return None
