"""Torch's functions that take index tensors: which argument it is, and its valid range."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional


@dataclasses.dataclass(frozen=True)
class IndexBounds:
    """The valid range of an index argument: indices of `size` things."""

    function: str
    size: int
    least: int = 0
    ignored: int | None = None
    """A value that is allowed although it is no index, such as `ignore_index`."""

    def problem(self, indices: torch.Tensor) -> str | None:
        """Return what is wrong with indices on the host; None if nothing is."""
        if indices.is_floating_point() or indices.dtype is torch.bool or not indices.numel():
            return None
        low, high = (int(value) for value in indices.aminmax())
        if self.least <= low and high < self.size:
            return None
        if self.ignored is not None:
            indices = indices[indices != self.ignored]
            return dataclasses.replace(self, ignored=None).problem(indices)
        return (
            f"has {low} to {high} for {self.function}, which takes {self.least} to {self.size - 1}"
        )


BoundedIndices = Iterator[tuple[Any, IndexBounds]]
_Arguments = dict[str, Any]


def _embedding(function_name: str, arguments: _Arguments) -> BoundedIndices:
    indices, weight = arguments["input"], arguments["weight"]
    if indices.is_floating_point():  # torch.embedding has the weight first
        indices, weight = weight, indices
    yield indices, IndexBounds(function_name, weight.shape[0])


def _loss(function_name: str, arguments: _Arguments) -> BoundedIndices:
    scores, target = arguments["input"], arguments["target"]
    if not target.is_floating_point():
        classes = scores.shape[0] if scores.dim() == 1 else scores.shape[1]
        yield target, IndexBounds(function_name, classes, ignored=arguments["ignore_index"])


def _margin(function_name: str, arguments: _Arguments) -> BoundedIndices:
    yield arguments["target"], IndexBounds(function_name, arguments["input"].shape[-1])


def _one_hot(function_name: str, arguments: _Arguments) -> BoundedIndices:
    if arguments["num_classes"] > 0:
        yield arguments["tensor"], IndexBounds(function_name, arguments["num_classes"])


def _along_dim(function_name: str, arguments: _Arguments) -> BoundedIndices:
    tensor, dim = arguments["input"], arguments["dim"]
    if isinstance(dim, int):
        yield (
            arguments["index"],
            IndexBounds(function_name, tensor.shape[dim] if tensor.dim() else 1),
        )


def _take(function_name: str, arguments: _Arguments) -> BoundedIndices:
    size = arguments["input"].numel()
    yield arguments["index"], IndexBounds(function_name, size, -size)


def _indexing(function_name: str, arguments: _Arguments) -> BoundedIndices:
    tensor, index = arguments["input"], arguments["index"]
    if not isinstance(tensor, torch.Tensor):
        return
    parts = [*index] if isinstance(index, (tuple, list)) else [index]
    for part, axis in zip(parts, _axes(parts, tensor.dim()), strict=True):
        if isinstance(part, torch.Tensor) and part.dtype is not torch.bool:
            size = tensor.shape[axis]
            yield part, IndexBounds("an index", size, -size)


def _axes(parts: list[Any], num_dims: int) -> list[int]:
    """Return the axis that each part of an index begins at."""
    num_axes = [_num_axes(part) for part in parts]
    ellipses = [position for position, part in enumerate(parts) if part is Ellipsis]
    if ellipses:
        num_axes[ellipses[0]] = num_dims - sum(num_axes)
    return [sum(num_axes[:position]) for position in range(len(parts))]


def _num_axes(part: Any) -> int:
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    is_mask = isinstance(part, torch.Tensor) and part.dtype is torch.bool
    return part.dim() if is_mask else 1


_DIM_INDEX = ("input", "dim", "index")
_Signature = tuple[str, ...] | Callable[..., Any]
_CALLS: dict[str, tuple[_Signature, Callable[[str, _Arguments], BoundedIndices]]] = {
    "embedding": (functional.embedding, _embedding),
    "embedding_bag": (functional.embedding_bag, _embedding),
    "cross_entropy": (functional.cross_entropy, _loss),
    "nll_loss": (functional.nll_loss, _loss),
    "multi_margin_loss": (functional.multi_margin_loss, _margin),
    "one_hot": (("tensor", "num_classes"), _one_hot),
    "take": (("input", "index"), _take),
    "take_along_dim": (("input", "index", "dim"), _along_dim),
    "__getitem__": (("input", "index"), _indexing), "getitem": (("input", "index"), _indexing),
    "__setitem__": (("input", "index"), _indexing), "setitem": (("input", "index"), _indexing),
    "index_put": (("input", "index"), _indexing), "index_put_": (("input", "index"), _indexing),
    **{
        name: (_DIM_INDEX, _along_dim)
        for base in ("gather", "index_select", "index_add", "index_copy", "index_fill", "scatter",
                     "scatter_add", "scatter_reduce")
        for name in (base, f"{base}_")
    },
}  # fmt: skip
"""Name of a function -> (the function or its arguments' names, which of them are indices)."""


def find_in_call(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[Any, IndexBounds]]:
    """Return the index tensors in a call, and the valid range of each."""
    if name not in _CALLS:
        return []
    signature, find = _CALLS[name]
    try:
        arguments = _bind(signature, args, kwargs)
        return [
            (indices, bounds)
            for indices, bounds in find(name, arguments)
            if isinstance(indices, torch.Tensor)
        ]
    except (KeyError, TypeError, IndexError, AttributeError):  # an unknown form of the call
        return []


def _bind(signature: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
    if not callable(signature):
        names = {"self": signature[0], "indices": "index"}
        named = {names.get(name, name): value for name, value in kwargs.items()}
        return {"dim": None, "num_classes": -1, **dict(zip(signature, args, strict=False)), **named}
    bound = inspect.signature(signature).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def writes(name: str) -> bool:
    """Return whether a function writes to its first tensor."""
    return (
        (name.endswith("_") and not name.endswith("__"))
        or name in ("__setitem__", "setitem")
        or (
            name.startswith("__i")
            and name.endswith("__")
            and name not in ("__invert__", "__index__")
        )
    )


def draws_random_numbers(name: str) -> bool:
    """Return whether a function draws random numbers."""
    return any(word in name for word in ("rand", "bernoulli", "multinomial", "dropout"))


def creates_from_numbers(name: str) -> bool:
    """Return whether a function creates a tensor from numbers alone."""
    return name in ("arange", "zeros", "ones", "full")


def to_host(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the same call for tensors on the host."""
    name = getattr(function, "__name__", "")
    if name in ("cuda", "xla", "cpu"):
        return torch.Tensor.clone, args[:1], {}
    host = torch.device("cpu")
    takes_device_names = name == "to"
    args = tuple(
        host
        if isinstance(argument, torch.device) or (takes_device_names and isinstance(argument, str))
        else argument
        for argument in args
    )
    kwargs = {key: value for key, value in kwargs.items() if key != "device"}
    if creates_from_numbers(name):
        kwargs["device"] = host
    if takes_device_names and len(args) == 1 and not kwargs:
        args = (*args, host)
    return function, args, kwargs
