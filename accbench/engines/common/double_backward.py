"""Second derivatives of compiled graphs.

AOTAutograd compiles a graph's backward pass, and no backward pass of that: a gradient with
`create_graph=True` comes back without a graph, or raises, depending on whether a tensor that was
saved for the backward pass requires a gradient (pytorch/pytorch#181581, pytorch/pytorch#91469).
Here such a gradient is computed through the graph that dynamo captured, run eagerly again.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import get_gradient_edge

from accbench.errors import RequestError

# AOTAutograd's name; each compiled graph has a class of its own with it.
_COMPILED_NODE = "CompiledFunctionBackward"
_CALL = "_accbench_call"


class DifferentiableGraph:
    """A compiled graph whose gradients can be differentiated again."""

    def __init__(
        self, graph: fx.GraphModule, device_type: str, on_eager_gradient: Callable[[], None]
    ) -> None:
        """Wrap a graph.

        Args:
            graph: as dynamo captured it; copied, for compilers change it.
            device_type: whose autocast counts.
            on_eager_gradient: called each time that a gradient is computed eagerly.
        """
        self.graph = fx.GraphModule(graph, copy.deepcopy(graph.graph))
        self.device_type, self.on_eager_gradient = device_type, on_eager_gradient
        self._written: frozenset[int] | None = None

    def run(self, compiled: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """Return `compiled(*inputs)`, with gradients that are differentiable."""
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
        output_index = {number: index for index, other, number in nodes if other is node}
        _intercept_backward(type(node)._forward_cls)
        setattr(node, _CALL, _Call(self, list(inputs), versions, output_index, autocast))
        return outputs

    @property
    def written(self) -> frozenset[int]:
        """Indices of the inputs that the graph writes to, such as BatchNorm's statistics."""
        assert self._written is not None
        return self._written


class _Call:
    """One call of a graph, with all that its gradients are computed from."""

    def __init__(
        self, graph: DifferentiableGraph, inputs: list[Any], versions: list[int],
        outputs: dict[int, int], autocast: tuple[bool, torch.dtype],
    ) -> None:  # fmt: skip
        self.graph, self.inputs, self.versions, self.outputs = graph, inputs, versions, outputs
        self.autocast = autocast

    def gradients(self, node: Any, gradients: Sequence[torch.Tensor | None]) -> list[Any]:
        """Return the gradient for each edge of `node`, with a graph of its own.

        Args:
            node: the compiled graph's node of autograd.
            gradients: for each output of the node.

        Raises:
            RequestError: eager and compiled graph would have different values.
        """
        self._refuse_changes()
        self.graph.on_eager_gradient()
        inputs = [self._alias(value) for value in self.inputs]
        differentiable = [i for i, value in enumerate(self.inputs) if _requires_grad(value)]
        outputs = self._run_eagerly(inputs)
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if number in self.outputs:
                pairs.append((outputs[self.outputs[number]], gradient))
            elif bool(gradient.count_nonzero()):
                raise _refusal("a view that the model returns is differentiated twice")
        grads = torch.autograd.grad(
            [output for output, _ in pairs], [inputs[i] for i in differentiable],
            [gradient for _, gradient in pairs], create_graph=True, allow_unused=True,
        )  # fmt: skip
        return self._by_edge(node, dict(zip(differentiable, grads, strict=True)))

    def _refuse_changes(self) -> None:
        for index, (then, now) in enumerate(
            zip(self.versions, _versions(self.inputs), strict=True)
        ):
            if then != now and index not in self.graph.written:
                raise RuntimeError(
                    "a tensor that the model's second derivative is computed from has been "
                    "modified by an inplace operation since the model was called: go back before "
                    "optimizer.step() and before writing to a batch"
                )

    def _alias(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        # An alias, for hooks on the tensor itself run when its gradient leaves the node.
        return value.view_as(value) if value.requires_grad else value.detach().clone()

    def _run_eagerly(self, inputs: list[Any]) -> Any:
        enabled, dtype = self.autocast
        before = _random_state()
        with torch.autocast(self.graph.device_type, dtype, enabled, cache_enabled=False):
            outputs = self.graph.graph(*inputs)
        after = _random_state()
        if any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)):
            raise _refusal("the model draws random numbers, as dropout does")
        return outputs

    def _by_edge(self, node: Any, grads: dict[int, torch.Tensor | None]) -> list[Any]:
        # An input may be there twice; its gradient is the sum, which one edge can carry.
        edges = {i: get_gradient_edge(self.inputs[i]) for i in grads}
        remaining = dict(grads)
        edge_grads = []
        for function, number in node.next_functions:
            matching = [
                i for i in remaining if edges[i].node is function and edges[i].output_nr == number
            ]
            parts = [part for i in matching if (part := remaining.pop(i)) is not None]
            edge_grads.append(sum(parts[1:], parts[0]) if parts else None)
        if any(gradient is not None for gradient in remaining.values()):
            raise _refusal("an input of the model has no edge in the compiled graph")
        return edge_grads


def _refusal(why: str) -> RequestError:
    return RequestError(
        f"{why}, so that a compiled model has no second derivative (create_graph=True); use "
        "--engine ddp or xla, or differentiate once"
    )


def _intercept_backward(kind: Any) -> None:
    """Make the nodes of a compiled graph return differentiable gradients where asked for.

    Args:
        kind: the subclass of torch.autograd.Function that AOTAutograd made for the graph.
    """
    if "backward" not in vars(kind) or getattr(kind.backward, _CALL, False):
        return
    compiled = kind.backward

    def backward(ctx: Any, *gradients: Any) -> Any:
        call = getattr(ctx, _CALL, None)
        if torch.is_grad_enabled() and call is not None:
            # From torch 2.15 on they come in one list (`boxed_grads_call`).
            is_boxed = len(gradients) == 1 and isinstance(gradients[0], list)
            return tuple(call.gradients(ctx, tuple(gradients[0]) if is_boxed else gradients))
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            setattr(ctx, _CALL, None)  # frees the inputs, as autograd frees saved tensors
        return compiled(ctx, *gradients)

    setattr(backward, _CALL, True)
    kind.backward = staticmethod(backward)


def _compiled_node(output: Any) -> tuple[Any, int]:
    """Return (the compiled graph's node, output number) of a tensor or of its base."""
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
