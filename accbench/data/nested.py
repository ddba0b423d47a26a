"""Batches as nests: tensors in tuples, named tuples, lists and mappings, in any depth."""

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

# What of a packed sequence lies on the device.
_OF_PACKED = ("data", "sorted_indices", "unsorted_indices")


def mapped(nest: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same nest with `change(tensor)` in each tensor's place; what is no tensor stays."""
    if isinstance(nest, torch.Tensor):
        return change(nest)
    if isinstance(nest, PackedSequence):  # its sizes are read on the host
        changed = {n: mapped(getattr(nest, n), change) for n in _OF_PACKED}
        return PackedSequence(batch_sizes=nest.batch_sizes, **changed)
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(mapped(part, change) for part in nest))
    if isinstance(nest, (tuple, list)):
        return type(nest)(mapped(part, change) for part in nest)
    if isinstance(nest, Mapping):
        changed = {key: mapped(part, change) for key, part in nest.items()}
        if not isinstance(nest, MutableMapping):
            return changed
        same = copy.copy(nest)  # of its own type, as torch's pinning does it
        same.update(changed)
        return same
    return nest


def named_tensors(nest: Any, name: str = "batch") -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor with its place, as `batch['labels']` or `batch[1]`, in the order of `mapped`."""
    if isinstance(nest, torch.Tensor):
        yield name, nest
    elif isinstance(nest, PackedSequence):
        for field in _OF_PACKED:
            yield from named_tensors(getattr(nest, field), f"{name}.{field}")
    elif isinstance(nest, tuple) and hasattr(nest, "_fields"):
        for field, part in zip(nest._fields, nest, strict=True):
            yield from named_tensors(part, f"{name}.{field}")
    elif isinstance(nest, (tuple, list)):
        for index, part in enumerate(nest):
            yield from named_tensors(part, f"{name}[{index}]")
    elif isinstance(nest, Mapping):
        for key, part in nest.items():
            yield from named_tensors(part, f"{name}[{key!r}]")


def tensors_of(nest: Any) -> list[torch.Tensor]:
    """All tensors, in the order of `mapped`."""
    return [tensor for _, tensor in named_tensors(nest)]


def parts(nest: Any) -> Iterator[torch.Tensor | PackedSequence]:
    """As `tensors_of`, with packed sequences whole."""
    if isinstance(nest, (torch.Tensor, PackedSequence)):
        yield nest
    elif isinstance(nest, (tuple, list)):
        for part in nest:
            yield from parts(part)
    elif isinstance(nest, Mapping):
        for part in nest.values():
            yield from parts(part)


def with_tensors(nest: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The same nest with these in the places of `tensors_of`."""
    others = iter(tensors)
    return mapped(nest, lambda _: next(others))


def chunks(nest: Any, num_parts: int) -> list[Any]:
    """The nest cut along the first dimension of its tensors into equal parts.

    Raises:
        ValueError: a tensor cannot be cut so.
    """
    if num_parts == 1:
        return [nest]
    for name, tensor in named_tensors(nest):
        if not tensor.dim() or len(tensor) % num_parts:
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} cannot be cut into {num_parts} equal parts"
            )
    cut = [tensor.chunk(num_parts) for tensor in tensors_of(nest)]
    return [with_tensors(nest, [parts[i] for parts in cut]) for i in range(num_parts)]


def signature(nest: Any) -> tuple[tuple[str, tuple[int, ...], torch.dtype], ...]:
    """What a compiler sees of a batch: each tensor's place, shape and type."""
    return tuple((name, tuple(t.shape), t.dtype) for name, t in named_tensors(nest))


def described(nest: Any) -> Any:
    """The nest for JSON: `shape` and `dtype` (such as torch.uint8) in place of each tensor."""
    return mapped(nest, lambda t: {"shape": list(t.shape), "dtype": str(t.dtype)})


def empty(description: Any) -> Any:
    """A nest of new tensors from what JSON has made of `described`; its lists become tuples."""
    if isinstance(description, Mapping) and description.keys() == {"shape", "dtype"}:
        dtype = getattr(torch, description["dtype"].removeprefix("torch."))
        return torch.empty(description["shape"], dtype=dtype)
    if isinstance(description, Mapping):
        return {key: empty(part) for key, part in description.items()}
    if isinstance(description, (tuple, list)):
        return tuple(empty(part) for part in description)
    return description
