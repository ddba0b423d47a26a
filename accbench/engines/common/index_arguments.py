"""Torch's functions that take tensors of indices: which argument it is, and what it may hold."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional


@dataclasses.dataclass(frozen=True)
class Taken:
    """Indices of `size` things, which an operation takes."""

    by: str
    size: int
    least: int = 0
    ignored: int | None = None
    """A number that stands for no index."""

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
        return f"has {low} to {high} for {self.by}, which takes {self.least} to {self.size - 1}"


Found = Iterator[tuple[Any, Taken]]
_Arguments = dict[str, Any]


def _embedding(by: str, given: _Arguments) -> Found:
    indices, weight = given["input"], given["weight"]
    if indices.is_floating_point():  # torch.embedding has the weight first
        indices, weight = weight, indices
    yield indices, Taken(by, weight.shape[0])


def _loss(by: str, given: _Arguments) -> Found:
    scores, target = given["input"], given["target"]
    if not target.is_floating_point():
        classes = scores.shape[0] if scores.dim() == 1 else scores.shape[1]
        yield target, Taken(by, classes, ignored=given["ignore_index"])


def _margin(by: str, given: _Arguments) -> Found:
    yield given["target"], Taken(by, given["input"].shape[-1])


def _one_hot(by: str, given: _Arguments) -> Found:
    if given["num_classes"] > 0:
        yield given["tensor"], Taken(by, given["num_classes"])


def _along_dim(by: str, given: _Arguments) -> Found:
    tensor, dim = given["input"], given["dim"]
    if isinstance(dim, int):
        yield given["index"], Taken(by, tensor.shape[dim] if tensor.dim() else 1)


def _take(by: str, given: _Arguments) -> Found:
    size = given["input"].numel()
    yield given["index"], Taken(by, size, -size)


def _item(by: str, given: _Arguments) -> Found:
    tensor, index = given["input"], given["index"]
    if not isinstance(tensor, torch.Tensor):
        return
    parts = [*index] if isinstance(index, (tuple, list)) else [index]
    for part, axis in zip(parts, _axes(parts, tensor.dim()), strict=True):
        if isinstance(part, torch.Tensor) and part.dtype is not torch.bool:
            size = tensor.shape[axis]
            yield part, Taken("an index", size, -size)


def _axes(parts: list[Any], num_dims: int) -> list[int]:
    """Return the axis that each part of an index begins at."""
    taken = [_num_axes(part) for part in parts]
    places = [place for place, part in enumerate(parts) if part is Ellipsis]
    if places:
        taken[places[0]] = num_dims - sum(taken)
    return [sum(taken[:place]) for place in range(len(parts))]


def _num_axes(part: Any) -> int:
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    is_mask = isinstance(part, torch.Tensor) and part.dtype is torch.bool
    return part.dim() if is_mask else 1


_DIM_INDEX = ("input", "dim", "index")
_Signature = tuple[str, ...] | Callable[..., Any]
_CALLS: dict[str, tuple[_Signature, Callable[[str, _Arguments], Found]]] = {
    "embedding": (functional.embedding, _embedding),
    "embedding_bag": (functional.embedding_bag, _embedding),
    "cross_entropy": (functional.cross_entropy, _loss),
    "nll_loss": (functional.nll_loss, _loss),
    "multi_margin_loss": (functional.multi_margin_loss, _margin),
    "one_hot": (("tensor", "num_classes"), _one_hot),
    "take": (("input", "index"), _take),
    "take_along_dim": (("input", "index", "dim"), _along_dim),
    "__getitem__": (("input", "index"), _item), "getitem": (("input", "index"), _item),
    "__setitem__": (("input", "index"), _item), "setitem": (("input", "index"), _item),
    "index_put": (("input", "index"), _item), "index_put_": (("input", "index"), _item),
    **{
        name: (_DIM_INDEX, _along_dim)
        for base in ("gather", "index_select", "index_add", "index_copy", "index_fill", "scatter",
                     "scatter_add", "scatter_reduce")
        for name in (base, f"{base}_")
    },
}  # fmt: skip
"""Name of a function -> (itself or its arguments' names, which of them are indices)"""


def of_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, Taken]]:
    """Return the tensors of indices in a call, and what each may hold."""
    if name not in _CALLS:
        return []
    signature, find = _CALLS[name]
    try:
        given = _bound(signature, args, kwargs)
        return [(i, t) for i, t in find(name, given) if isinstance(i, torch.Tensor)]
    except (KeyError, TypeError, IndexError, AttributeError):  # called in a form that is not known
        return []


def _bound(signature: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
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


def draws(name: str) -> bool:
    """Return whether a function draws random numbers."""
    return any(word in name for word in ("rand", "bernoulli", "multinomial", "dropout"))


def makes_integers(name: str) -> bool:
    """Return whether a function makes tensors of nothing but numbers."""
    return name in ("arange", "zeros", "ones", "full")


def on_host(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the same call for tensors on the host."""
    name = getattr(function, "__name__", "")
    if name in ("cuda", "xla", "cpu"):
        return torch.Tensor.clone, args[:1], {}
    host = torch.device("cpu")
    strings = name == "to"
    args = tuple(
        host if isinstance(one, torch.device) or (strings and isinstance(one, str)) else one
        for one in args
    )
    kwargs = {key: value for key, value in kwargs.items() if key != "device"}
    if makes_integers(name):
        kwargs["device"] = host
    if strings and len(args) == 1 and not kwargs:
        args = (*args, host)
    return function, args, kwargs
