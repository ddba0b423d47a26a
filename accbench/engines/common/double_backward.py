"""Second derivatives of compiled graphs.

AOTAutograd compiles a graph's backward pass, and no backward pass of that: a gradient that is
asked for with `create_graph=True` comes back without a graph, or raises, by whether a tensor that
was saved for the backward pass requires a gradient (pytorch/pytorch#181581, pytorch/pytorch#91469).
Here such a gradient is computed through the graph that dynamo found, run eagerly once more.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import get_gradient_edge

from accbench.errors import RequestError

# AOTAutograd's, of which each compiled graph has a class of its own.
_COMPILED_NODE = "CompiledFunctionBackward"
_CALL = "_accbench_call"


class DifferentiableGraph:
    """A compiled graph whose gradients can be differentiated again."""

    def __init__(self, graph: fx.GraphModule, device_type: str, asked: Callable[[], None]) -> None:
        """
        Args:
            graph: as dynamo found it; copied, for compilers change it.
            device_type: whose autocast counts.
            asked: called each time that a gradient is computed eagerly.
        """
        self.graph = fx.GraphModule(graph, copy.deepcopy(graph.graph))
        self.device_type, self.asked = device_type, asked
        self._written: frozenset[int] | None = None

    def run(self, compiled: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """Return `compiled(*inputs)`, whose gradients are differentiable."""
        if not torch.is_grad_enabled():
            return compiled(*inputs)
        before = _versions(inputs) if self._written is None else []
        outputs = compiled(*inputs)
        nodes = [(index, *_compiled_node(output)) for index, output in enumerate(outputs)]
        node = next((node for _, node, _ in nodes if node is not None), None)
        if node is None:
            return outputs
        versions = _versions(inputs)
        if self._written is None:
            pairs = enumerate(zip(before, versions, strict=True))
            self._written = frozenset(index for index, (old, new) in pairs if old != new)
        kind = self.device_type
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        of_outputs = {number: index for index, other, number in nodes if other is node}
        _intercept(type(node)._forward_cls)
        setattr(node, _CALL, _Call(self, list(inputs), versions, of_outputs, autocast))
        return outputs

    @property
    def written(self) -> frozenset[int]:
        """The inputs that the graph itself writes to, such as BatchNorm's statistics."""
        assert self._written is not None
        return self._written


class _Call:
    """One call of a graph: what its gradients are computed from."""

    def __init__(
        self, of: DifferentiableGraph, inputs: list[Any], versions: list[int],
        outputs: dict[int, int], autocast: tuple[bool, torch.dtype],
    ) -> None:  # fmt: skip
        self.of, self.inputs, self.versions, self.outputs = of, inputs, versions, outputs
        self.autocast = autocast

    def gradients(self, node: Any, gradients: Sequence[torch.Tensor | None]) -> list[Any]:
        """Return the gradient for each edge of `node`, with a graph of its own.

        Args:
            gradients: for each output of the node.

        Raises:
            RequestError: eager and compiled graph would not have the same value.
        """
        self._refuse_changes()
        self.of.asked()
        inputs = [self._alias(value) for value in self.inputs]
        learned = [i for i, value in enumerate(self.inputs) if _requires_grad(value)]
        outputs = self._eagerly(inputs)
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if number in self.outputs:
                pairs.append((outputs[self.outputs[number]], gradient))
            elif bool(gradient.count_nonzero()):
                raise _refused("a view that the model returns is differentiated twice")
        found = torch.autograd.grad(
            [output for output, _ in pairs], [inputs[i] for i in learned],
            [gradient for _, gradient in pairs], create_graph=True, allow_unused=True,
        )  # fmt: skip
        return self._by_edge(node, dict(zip(learned, found, strict=True)))

    def _refuse_changes(self) -> None:
        for index, (then, now) in enumerate(
            zip(self.versions, _versions(self.inputs), strict=True)
        ):
            if then != now and index not in self.of.written:
                raise RuntimeError(
                    "a tensor that the model's second derivative is computed from has been "
                    "modified by an inplace operation since the model was called: go back before "
                    "optimizer.step() and before writing to a batch"
                )

    def _alias(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        # Hooks on the tensor itself run when its gradient leaves the node.
        return value.view_as(value) if value.requires_grad else value.detach().clone()

    def _eagerly(self, inputs: list[Any]) -> Any:
        enabled, dtype = self.autocast
        before = _random_state()
        with torch.autocast(self.of.device_type, dtype, enabled, cache_enabled=False):
            outputs = self.of.graph(*inputs)
        after = _random_state()
        if any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)):
            raise _refused("the model draws random numbers, as dropout does")
        return outputs

    def _by_edge(self, node: Any, found: dict[int, torch.Tensor | None]) -> list[Any]:
        # An input may be there twice; its gradient is the sum, which one edge can carry.
        edges = {i: get_gradient_edge(self.inputs[i]) for i in found}
        left = dict(found)
        of_edges = []
        for function, number in node.next_functions:
            here = [i for i in left if edges[i].node is function and edges[i].output_nr == number]
            parts = [part for i in here if (part := left.pop(i)) is not None]
            of_edges.append(sum(parts[1:], parts[0]) if parts else None)
        if any(gradient is not None for gradient in left.values()):
            raise _refused("an input of the model has no edge in the compiled graph")
        return of_edges


def _refused(why: str) -> RequestError:
    return RequestError(
        f"{why}, so that a compiled model has no second derivative (create_graph=True); use "
        "--engine ddp or xla, or differentiate once"
    )


def _intercept(kind: Any) -> None:
    """Have the nodes of a compiled graph give differentiable gradients where those are asked for.

    Args:
        kind: the subclass of torch.autograd.Function that AOTAutograd made for the graph.
    """
    if "backward" not in vars(kind) or getattr(kind.backward, _CALL, False):
        return
    from torch._functorch import config

    compiled = kind.backward

    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        call = getattr(ctx, _CALL, None)
        if torch.is_grad_enabled() and call is not None:
            return tuple(call.gradients(ctx, gradients))
        if torch._C._autograd._get_current_graph_task_keep_graph():
            # AOTAutograd looks whether anything is donated, which nothing is here, by this alone.
            with config.patch(donated_buffer=False):
                return compiled(ctx, *gradients)
        setattr(ctx, _CALL, None)  # lets go of the inputs, as of what was saved
        return compiled(ctx, *gradients)

    setattr(backward, _CALL, True)
    kind.backward = staticmethod(backward)


def _compiled_node(output: Any) -> tuple[Any, int]:
    """Return (the compiled graph's node, which of its outputs) of a tensor or of its base."""
    if not _requires_grad(output):
        return None, -1
    for tensor in (output, output._base):
        if tensor is not None and type(tensor.grad_fn).__name__ == _COMPILED_NODE:
            return tensor.grad_fn, tensor.output_nr if tensor is output else -1
    return None, -1


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _versions(values: Sequence[Any]) -> list[int]:
    return [
        value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0
        for value in values
    ]


def _random_state() -> list[torch.Tensor]:
    states: Iterator[torch.Tensor] = iter(())
    if torch.cuda.is_initialized():
        states = iter(torch.cuda.get_rng_state_all())
    return [torch.get_rng_state(), *states]
