"""What a step's graph will be, known without making the graph.

The forward pass runs once, on shapes and types alone, and all that it does is noted: each ATen
operation with what it is given, whether that has a gradient, and the graph that autograd would go
back by. Forward and backward pass follow from these alone, but for what is refused here: Python
that runs in the backward pass (functions of autograd of one's own, hooks, checkpoints), and
operations of one's own, of which only the name would be noted.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from accbench.engines.jax import capture

_PLAIN = (
    type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip


# Torch's own: what is behind others' names may be edited and keep its name.
_KNOWN = ("aten", "prims", "prim", "mkldnn", "torchvision")


class UnknownError(Exception):
    """The graph is not known by its forward pass."""


def of_step(
    model: nn.Module, loss: Callable[..., torch.Tensor], batch: Any,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]],
) -> tuple[str, list[int]]:  # fmt: skip
    """A digest of the step of `loss(model, batch)`, and how many it reads of each of `beside`.

    Raises:
        UnknownError: it has none.
    """
    trained = [place for place, p in enumerate(model.parameters()) if p.requires_grad]
    with capture.faked(trained, model, batch) as given, _no_python_in_backward():
        notes = _Notes(given)
        with notes:
            value, reads = capture.loss_of(model, loss, batch, autocast, trained, *given)
        notes.way_back(value)
    return notes.digest.hexdigest(), reads


class _Notes(TorchDispatchMode):
    """Notes operations as they are called, below autograd and autocast."""

    def __init__(self, given: tuple[list[torch.Tensor], ...]) -> None:
        super().__init__()
        self.digest = hashlib.sha256()
        self._number: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []  # or another would have its id
        for tensors in given:
            self._note(len(tensors))
            for tensor in tensors:
                self._meet(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload) or func.namespace not in _KNOWN:
            raise UnknownError(str(func))
        leaves, form = tree_flatten((args, kwargs))
        self._note(func, form, *(self._of(leaf) for leaf in leaves))
        result = func(*args, **kwargs)
        for leaf in tree_flatten(result)[0]:
            if isinstance(leaf, torch.Tensor):
                self._meet(leaf)
        return result

    def way_back(self, value: torch.Tensor) -> None:
        """Note the graph by which autograd goes back from here."""
        self._note("back", self._of(value))
        numbers: dict[Any, int] = {}
        waiting = [] if value.grad_fn is None else [value.grad_fn]
        for node in waiting:
            numbers[node] = len(numbers)
        while waiting:
            node = waiting.pop()
            if isinstance(node, BackwardCFunction) and not _is_own(node):
                raise UnknownError(node.name())
            self._note(numbers[node], node.name())
            variable = getattr(node, "variable", None)
            if variable is not None:  # where a gradient is added up
                self._note(self._of(variable))
            for following, place in node.next_functions:
                if following is not None and following not in numbers:
                    numbers[following] = len(numbers)
                    waiting.append(following)
                self._note(None if following is None else numbers[following], place)

    def _meet(self, tensor: torch.Tensor) -> None:
        if id(tensor) not in self._number:
            self._number[id(tensor)] = len(self._number)
            self._alive.append(tensor)
        self._note(self._of(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def _of(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            number = self._number.get(id(leaf))
            if number is not None:
                return number, leaf.requires_grad
            if type(leaf) not in (torch.Tensor, nn.Parameter):
                raise UnknownError(f"a {type(leaf).__name__} from elsewhere")
            # A constant of the graph.
            with _disable_current_modes():
                values = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                content = hashlib.sha256(values.numpy().tobytes()).hexdigest()
            return content, tuple(leaf.shape), leaf.dtype, leaf.requires_grad
        if not isinstance(leaf, _PLAIN):
            raise UnknownError(f"a {type(leaf).__name__} is given to an operation")
        return leaf

    def _note(self, *facts: Any) -> None:
        self.digest.update(f"{facts!r}\n".encode())


def _is_own(node: Any) -> bool:
    """Of accbench, whose text the step's name depends on anyway."""
    return type(node)._forward_cls.__module__.startswith("accbench.")


@contextlib.contextmanager
def _no_python_in_backward() -> Iterator[None]:
    """Refuse what autograd does not show of its graph."""
    refused: Any = {
        (torch.Tensor, "register_hook"), (torch.Tensor, "register_post_accumulate_grad_hook"),
        (torch.autograd.graph.saved_tensors_hooks, "__enter__"),
    }  # fmt: skip

    def refuse(*_: Any, **__: Any) -> Any:
        raise UnknownError("a hook")

    with contextlib.ExitStack() as stack:
        for owner, name in refused:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, refuse)
        yield
