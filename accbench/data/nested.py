"""Batches and outputs as nested containers of tensors, of the kinds in `nest_kinds`."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from accbench.data import nest_kinds
from accbench.errors import RequestError

# How many parts of a container are asked how many samples it has.
_NUM_ASKED = 8


def mapped(
    nest: Any, change: Callable[[torch.Tensor], Any],
    by_itself: Callable[[Any], Any] | None = None, doing: str = "rebuilt with other tensors",
) -> Any:  # fmt: skip
    """Apply `change` to each tensor in a nest, and return a nest of the same structure.

    What is not a tensor stays unchanged.

    Args:
        nest: tensors in any nesting.
        change: function of a tensor.
        by_itself: function of an object with its own `.to(device)`; None to treat such objects like
            all others.
        doing: what is done, for the message on an object that it cannot be done to.

    Raises:
        RequestError: an object of no known kind holds tensors.
    """
    if isinstance(nest, torch.Tensor):
        return change(nest)
    if by_itself is not None and nest_kinds.moves_itself(nest):
        return by_itself(nest)
    kind = nest_kinds.find_kind(nest)
    if kind is None:
        nest_kinds.refuse_holder(nest, doing)
        return nest
    parts = [mapped(part, change, by_itself, doing) for _, part in kind.parts(nest)]
    return kind.rebuilt(nest, parts)


def named_tensors(nest: Any, name: str = "batch") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors with their paths, such as `batch['labels']`, in the order of `mapped`.

    They include tensors that objects of no known kind hold.
    """
    kind = nest_kinds.find_kind(nest)
    if kind is None:
        yield from nest_kinds.held(nest, name)
        return
    for path, part in kind.parts(nest):
        yield from named_tensors(part, f"{name}{path}")


def tensors_of(nest: Any) -> list[torch.Tensor]:
    """Return all tensors, in the order of `mapped`."""
    return [tensor for _, tensor in named_tensors(nest)]


def num_rows(nest: Any, expected: int | None = None) -> int:
    """Return how many samples a batch has: the length that its tensors, or lists of them, share.

    Where they share several, it is the number that is expected, and the first tensor's length if
    that is none of them: a list of 8 images of 3 channels may be 8 samples or 3. For a packed
    sequence it is the number of sequences. An object may state it, as batches of graphs do
    (`num_graphs`, `batch_size`). It is 1 if nothing has a length.

    Args:
        nest: the batch.
        expected: the loader's batch size; None if not known.
    """
    possible = _possible_rows(nest)
    return expected if expected in possible else next(iter(possible), 1)


def _possible_rows(nest: Any) -> list[int]:
    """Return the numbers of samples that a nest may have, the likeliest first."""
    kind = nest_kinds.find_kind(nest)
    if kind is None or isinstance(nest, PackedSequence) or nest_kinds.moves_itself(nest):
        return [*itertools.islice(_rows(nest), 1)]
    asked = (_possible_rows(part) for _, part in kind.parts(nest)[:_NUM_ASKED])
    by_part = [rows for rows in asked if rows]
    shared = [n for n in by_part[0] if all(n in rows for rows in by_part)] if by_part else []
    is_list = isinstance(nest, Sequence) and not hasattr(nest, "_fields")
    if by_part and not shared:  # such as positions beside tokens
        shared = [*itertools.islice(_rows(nest), 1)]
        shared += [] if is_list else itertools.chain(*by_part)
    return [*shared, len(nest)] if is_list and len(nest) else shared


def _rows(nest: Any) -> Iterator[int]:
    if isinstance(nest, PackedSequence):
        yield int(nest.batch_sizes[0])
        return
    if isinstance(nest, torch.Tensor):
        if nest.dim():
            yield len(nest)
        return
    kind = nest_kinds.find_kind(nest)
    if kind is None or nest_kinds.moves_itself(nest):
        for name in ("num_graphs", "batch_size"):
            size = getattr(nest, name, None)
            if isinstance(size, int):
                yield size
    parts = nest_kinds.held(nest) if kind is None else kind.parts(nest)
    for _, part in parts:
        yield from _rows(part)


def with_tensors(nest: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the same nest with `tensors` in the order of `tensors_of`."""
    others = iter(tensors)
    return mapped(nest, lambda _: next(others))


def chunks(nest: Any, num_parts: int) -> list[Any]:
    """Split the nest along the first dimension of its tensors into equal parts.

    Raises:
        ValueError: a tensor cannot be split so.
        RequestError: the nest has a packed sequence, which cannot be split.
    """
    if num_parts == 1:
        return [nest]
    _refuse_packed(nest)
    for name, tensor in named_tensors(nest):
        if not tensor.dim() or len(tensor) % num_parts:
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} cannot be cut into {num_parts} equal parts"
            )
    split = [tensor.chunk(num_parts) for tensor in tensors_of(nest)]
    return [with_tensors(nest, [parts[i] for parts in split]) for i in range(num_parts)]


def _refuse_packed(nest: Any) -> None:
    if isinstance(nest, PackedSequence):
        raise RequestError(
            "--accumulate cannot split a packed sequence, whose rows are time steps; give padded "
            "sequences, or leave it out"
        )
    kind = nest_kinds.find_kind(nest)
    for _, part in kind.parts(nest) if kind is not None else ():
        _refuse_packed(part)


def signature(nest: Any) -> tuple[tuple[str, tuple[int, ...], torch.dtype], ...]:
    """Return what a compiler sees of a batch: each tensor's path, shape and type."""
    return tuple((name, tuple(t.shape), t.dtype) for name, t in named_tensors(nest))


def described(nest: Any) -> Any:
    """Describe the nest for JSON: `shape` and `dtype` (torch.uint8) in place of each tensor."""
    return mapped(nest, lambda t: {"shape": list(t.shape), "dtype": str(t.dtype)})


def empty(description: Any) -> Any:
    """Create a nest of new tensors from the JSON of `described`; its lists become tuples."""
    if isinstance(description, Mapping) and description.keys() == {"shape", "dtype"}:
        dtype = getattr(torch, description["dtype"].removeprefix("torch."))
        return torch.empty(description["shape"], dtype=dtype)
    if isinstance(description, Mapping):
        return {key: empty(part) for key, part in description.items()}
    if isinstance(description, (tuple, list)):
        return tuple(empty(part) for part in description)
    return description
