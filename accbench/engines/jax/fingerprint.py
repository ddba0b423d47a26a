"""A digest of a step's graph, computed without making the graph.

The forward pass runs once, on shapes and dtypes alone, and everything that it does enters the
digest: each ATen operation with its arguments, whether these have a gradient, and the graph that
autograd would run backward. Forward and backward pass follow from these alone. The exceptions are
refused here: Python that runs in the backward pass (custom autograd functions, hooks,
checkpoints), and custom operations, of which only the name would enter.
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

from accbench.engines.jax import functional

_PLAIN = (
    type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip


# Torch's own: operations of others may be edited and keep their names.
_NAMESPACES = ("aten", "prims", "prim", "mkldnn", "torchvision")
# Accbench's, whose text enters the step's name. Ring attention's are not among them: their group of
# ranks is given by its name alone.
_OWN_OPERATIONS = ("accbench::fused_attention", "accbench::fused_attention_backward")


class UnknownError(Exception):
    """The forward pass alone does not determine the step's graph."""


def step_digest(
    model: nn.Module, loss: Callable[..., torch.Tensor], batch: Any,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]],
) -> tuple[str, list[int]]:  # fmt: skip
    """Return a digest of the step of `loss(model, batch)`.

    Args:
        model: on the host.
        loss: called with the model and the batch.
        batch: on the host.
        autocast: entered around the forward pass.

    Returns:
        The digest, and how many tensors the forward pass reads of each source of extra inputs.

    Raises:
        UnknownError: the forward pass does not determine the graph.
    """
    trained = [index for index, p in enumerate(model.parameters()) if p.requires_grad]
    with functional.fake_inputs(trained, model, batch) as tensors, _refuse_hooks():
        mode = _DigestMode(tensors)
        with mode:
            value, reads = functional.compute_loss(model, loss, batch, autocast, trained, *tensors)
        mode.add_autograd_graph(value)
    return mode.digest.hexdigest(), reads


class _DigestMode(TorchDispatchMode):
    """Digests operations as they are dispatched, below autograd and autocast."""

    def __init__(self, inputs: tuple[list[torch.Tensor], ...]) -> None:
        super().__init__()
        self.digest = hashlib.sha256()
        self._tensor_ids: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []  # or another tensor would get the same id
        for tensors in inputs:
            self._add(len(tensors))
            for tensor in tensors:
                self._add_tensor(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload) or not _is_determined_by_name(func):
            raise UnknownError(str(func))
        leaves, treedef = tree_flatten((args, kwargs))
        self._add(func, treedef, *(self._describe(leaf) for leaf in leaves))
        result = func(*args, **kwargs)
        for leaf in tree_flatten(result)[0]:
            if isinstance(leaf, torch.Tensor):
                self._add_tensor(leaf)
        return result

    def add_autograd_graph(self, value: torch.Tensor) -> None:
        """Add the graph through which autograd goes back from `value`."""
        self._add("back", self._describe(value))
        node_ids: dict[Any, int] = {}
        pending = [] if value.grad_fn is None else [value.grad_fn]
        for node in pending:
            node_ids[node] = len(node_ids)
        while pending:
            node = pending.pop()
            if isinstance(node, BackwardCFunction) and not _is_builtin(node):
                raise UnknownError(node.name())
            self._add(node_ids[node], node.name())
            variable = getattr(node, "variable", None)
            if variable is not None:  # an AccumulateGrad node
                self._add(self._describe(variable))
            for next_node, input_index in node.next_functions:
                if next_node is not None and next_node not in node_ids:
                    node_ids[next_node] = len(node_ids)
                    pending.append(next_node)
                self._add(None if next_node is None else node_ids[next_node], input_index)

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        if id(tensor) not in self._tensor_ids:
            self._tensor_ids[id(tensor)] = len(self._tensor_ids)
            self._alive.append(tensor)
        self._add(self._describe(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def _describe(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            number = self._tensor_ids.get(id(leaf))
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

    def _add(self, *facts: Any) -> None:
        self.digest.update(f"{facts!r}\n".encode())


def _is_determined_by_name(operation: torch._ops.OpOverload) -> bool:
    return operation.namespace in _NAMESPACES or operation._schema.name in _OWN_OPERATIONS


def _is_builtin(node: Any) -> bool:
    """Return whether it is accbench's, whose text enters the step's name anyway."""
    return type(node)._forward_cls.__module__.startswith("accbench.")


@contextlib.contextmanager
def _refuse_hooks() -> Iterator[None]:
    """Raise UnknownError for hooks, which autograd's graph does not show."""
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
