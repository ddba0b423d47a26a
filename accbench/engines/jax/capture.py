"""Capture of a training step of a torch module as one graph.

The graph computes the loss, its gradients, and the new values of buffers. torch's own
`aot_export_module` makes it: the joint graph of forward and backward pass in ATen, free of side
effects. That function is private, so it is used here alone. Python's branches are in the graph as
they were taken.
"""

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from accbench.data import nested
from accbench.engines.common import (
    extra_inputs,
    extra_state,
    model_errors,
    model_state,
    python_snapshot,
    python_state,
    source_location,
)
from accbench.engines.jax import functional
from accbench.engines.jax.functional import Tensors
from accbench.engines.jax.traceable import traceable
from accbench.errors import RequestError

_NO_GRADIENT_MESSAGE = "did not receive a gradient"


@dataclasses.dataclass(frozen=True)
class CapturedStep:
    """A graph for one signature of batches.

    It takes the tensors of `trained`, then all other parameters and buffers, the loss's factor, the
    batch's tensors and the extra inputs. It returns the new values of `mutated_buffers`, those of
    tensors of the batch that were written to, the loss times the factor, the loss, and the
    gradients.
    """

    graph: torch.fx.GraphModule
    trained: list[int]
    """Indices of the model's parameters that have a gradient."""
    mutated_buffers: list[int]
    """Indices of the model's buffers that are written to."""
    num_mutated_inputs: int
    """How many tensors of the batch are written to; the results are dropped."""
    reads: list[int]
    """How many tensors a forward pass reads of each source of extra inputs."""

    def inputs(self, parameters: Sequence[Any], buffers: Sequence[Any], *inputs: Any) -> list[Any]:
        """Order the graph's inputs.

        Args:
            parameters: all, in the model's order.
            buffers: all, in the model's order.
            *inputs: what follows them: the factor, the batch's tensors and the extra inputs.
        """
        trained = set(self.trained)
        others = [p for index, p in enumerate(parameters) if index not in trained]
        return [*(parameters[index] for index in self.trained), *others, *buffers, *inputs]

    def outputs(self, values: Sequence[Any]) -> tuple[list[Any], Any, list[Any]]:
        """Split the graph's results: (new `mutated_buffers`, loss, gradients of `trained`)."""
        num_buffers = len(self.mutated_buffers)
        loss_index = num_buffers + self.num_mutated_inputs + 1
        return list(values[:num_buffers]), values[loss_index], list(values[loss_index + 1 :])


class _FunctionalLoss(nn.Module):
    """Holds each tensor of the model once, whatever its names.

    So the gradients of tied parameters add up.
    """

    def __init__(self, trained: Tensors, others: Tensors, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.num_trained, self.num_others, self.loss = len(trained), len(others), loss
        for index, tensor in enumerate(trained):
            self.register_parameter(f"trained{index}", nn.Parameter(tensor))
        for index, tensor in enumerate(others):
            self.register_buffer(f"other{index}", tensor)

    def forward(self, factor: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        trained = [getattr(self, f"trained{index}") for index in range(self.num_trained)]
        others = [getattr(self, f"other{index}") for index in range(self.num_others)]
        loss = self.loss(trained, others, inputs)
        # Scaled in here, because the backward pass begins at the first result with gradient 1.
        return loss * factor, loss.detach()


class _FunctionalScore(_FunctionalLoss):
    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        others = [getattr(self, f"other{index}") for index in range(self.num_others)]
        return (self.loss([], others, inputs),)


def capture(
    model: nn.Module, loss: Callable[..., torch.Tensor], batch: Any,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]], decompositions: Any,
    fused_attention: bool = False,
) -> CapturedStep:  # fmt: skip
    """Capture the step of `loss(model, batch)` as one graph.

    Args:
        model: on the host; left as it is.
        loss: called with the model and the batch.
        batch: on the host; left as it is.
        autocast: entered around the forward pass.
        decompositions: of operations that the graph must not have, as torch's tables are.
        fused_attention: keep attention without dropout as one operation.

    Raises:
        RequestError: the step cannot be one graph; the message names the place in the model.
    """
    parameters = list(model.parameters())
    trained = [index for index, p in enumerate(parameters) if p.requires_grad]
    arguments = model, loss, batch, autocast, decompositions, fused_attention
    saved = python_snapshot.PythonSnapshot(model)
    try:
        try:
            return _capture(trained, *arguments)
        except AssertionError as error:
            if _NO_GRADIENT_MESSAGE not in str(error):
                raise
        saved.restore()
        with_gradient = _params_with_gradient(trained, *arguments[:4])
        saved.restore()
        return _capture(with_gradient, *arguments)
    except (RequestError, MemoryError):
        raise
    except Exception as error:
        saved.restore()
        model_error = model_errors.error_of_call(
            model, lambda: _run_eager_step(model, loss, batch, autocast, trained)
        )
        if model_error is not None:
            raise model_error from None
        raise RequestError(_error_message(error)) from error


def _run_eager_step(
    model: nn.Module, loss: Callable[..., torch.Tensor], batch: Any, autocast: Callable[[], Any],
    trained: list[int],
) -> None:  # fmt: skip
    """Run forward and backward pass on the host, leaving no gradient."""
    with autocast():
        value = loss(model, batch)
    parameters = [*model.parameters()]
    torch.autograd.grad(value, [parameters[index] for index in trained], allow_unused=True)


def _capture(
    trained: list[int], model: nn.Module, loss: Callable[..., torch.Tensor], batch: Any,
    autocast: Callable[[], Any], decompositions: Any, fused_attention: bool,
) -> CapturedStep:  # fmt: skip
    from torch._functorch.aot_autograd import aot_export_module

    parameters, buffers = list(model.parameters()), list(model.buffers())
    others = [p for index, p in enumerate(parameters) if index not in set(trained)]
    reads: list[int] = []

    def loss_of_tensors(
        trained_tensors: Tensors, other_tensors: Tensors, inputs: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        value, reads[:] = functional.compute_loss(
            model, loss, batch, autocast, trained, trained_tensors, other_tensors, inputs
        )
        return value

    inputs = functional.contiguous_clones(
        [torch.ones(()), *nested.tensors_of(batch), *extra_inputs.tensors()]
    )
    trained_tensors = functional.contiguous_clones(parameters[index] for index in trained)
    holder = _FunctionalLoss(
        trained_tensors, functional.contiguous_clones([*others, *buffers]), loss_of_tensors
    )
    watch = python_state.PythonStateWatch(model, [loss])
    saved = python_snapshot.PythonSnapshot(model, watch.generators())
    before = python_state.numbers_in(watch.state())
    # Tensors that are plain attributes of the model become constants of the graph.
    with traceable(model, fused_attention), functional.fake_mode(parameters):
        graph: Any
        graph, signature = aot_export_module(
            holder, inputs, trace_joint=True, output_loss_index=0, decompositions=decompositions
        )
    if saved.draws_random_numbers():
        raise RequestError(
            "--engine jax captures the step once, and the forward pass draws random numbers of "
            "Python's or numpy's, which would be the same in every step: draw them with torch, "
            "or use --engine inductor, xla or ddp"
        )
    if python_state.numbers_in(watch.state()) != before:
        with python_snapshot.restored(model):
            _refuse_changing_numbers(watch, trained, model, loss, batch, autocast)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    mutated_buffers = [
        int(name.removeprefix("other")) for name in signature.buffers_to_mutate.values()
    ]
    mutated_buffers = [index - len(others) for index in mutated_buffers]
    num_mutated_inputs = len(signature.user_inputs_to_mutate)
    return CapturedStep(graph, trained, mutated_buffers, num_mutated_inputs, reads)


def _refuse_changing_numbers(
    watch: python_state.PythonStateWatch, trained: list[int], model: nn.Module,
    loss: Callable[..., torch.Tensor], batch: Any, autocast: Callable[[], Any],
) -> None:  # fmt: skip
    """Raise RequestError if every forward pass changes a number, for a graph is captured once."""
    before = python_state.numbers_in(watch.state())
    with functional.fake_inputs(trained, model, batch) as (
        trained_tensors,
        other_tensors,
        inputs,
    ):
        functional.compute_loss(
            model, loss, batch, autocast, trained, trained_tensors, other_tensors, inputs
        )
    for name, value in python_state.numbers_in(watch.state()).items():
        if before.get(name, value) != value:
            raise RequestError(
                f"--engine jax captures the step once, and every forward pass changes {name} (now "
                f"{value}): keep it in a buffer, a tensor, or use --engine inductor, xla or ddp"
            )


def refuse_changing_extra_state(
    model: nn.Module, loss: Callable[..., torch.Tensor], batch: Any, autocast: Callable[[], Any]
) -> None:
    """Raise RequestError if every forward pass changes a module's extra state.

    It is Python's, and a graph would not change it. Two passes on the host leave the state that
    a first step would leave. Nothing is run for models without extra state.
    """
    if model_state.first_with_extra_state(model) is None:
        return
    for is_last in (False, True):
        before = model_state.read_extra(model)
        functional.build_lazy_buffers(model, loss, batch, autocast)
        after = model_state.read_extra(model)
        changed = [key for key in after if not extra_state.equal(before.get(key), after[key])]
        if not changed:
            return
        if is_last:
            raise RequestError(
                f"--engine jax captures the step once, and every forward pass changes {changed[0]}:"
                " keep it in a buffer, a tensor, or use --engine inductor, xla or ddp"
            )


def capture_score(
    model: nn.Module, score: Callable[..., torch.Tensor], batch: Any,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]], decompositions: Any,
) -> torch.fx.GraphModule:  # fmt: skip
    """Capture `score(model, batch)` as a graph without gradients.

    It takes parameters, buffers, the batch's tensors and the extra inputs.

    Args:
        model: on the host.
        score: called with the model and the batch.
        batch: on the host.
        autocast: entered around the forward pass.
        decompositions: of operations that the graph must not have.

    Raises:
        RequestError: it cannot be one graph, or the model writes to its buffers.
    """
    from torch._functorch.aot_autograd import aot_export_module

    def loss_of_tensors(
        _: Tensors, other_tensors: Tensors, inputs: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        return functional.compute_loss(
            model, score, batch, autocast, [], [], other_tensors, inputs
        )[0]

    holder = _FunctionalScore(
        [], functional.contiguous_clones([*model.parameters(), *model.buffers()]), loss_of_tensors
    )
    inputs = functional.contiguous_clones([*nested.tensors_of(batch), *extra_inputs.tensors()])
    try:
        with torch.no_grad(), traceable(model, fused_attention=False), functional.fake_mode():
            graph: Any
            graph, signature = aot_export_module(
                holder, inputs, trace_joint=False, decompositions=decompositions
            )
    except (RequestError, MemoryError):
        raise
    except Exception as error:
        raise RequestError(_error_message(error)) from error
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
        raise RequestError("the model writes to its buffers or its batch in evaluation")
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _params_with_gradient(
    trained: list[int], model: nn.Module, loss: Callable[..., torch.Tensor], batch: Any,
    autocast: Callable[[], Any],
) -> list[int]:  # fmt: skip
    """Return those of `trained` that the loss depends on; torch exports no graph with others."""
    with functional.fake_inputs(trained, model, batch) as (
        trained_tensors,
        other_tensors,
        inputs,
    ):
        value, _ = functional.compute_loss(
            model, loss, batch, autocast, trained, trained_tensors, other_tensors, inputs
        )
        gradients = torch.autograd.grad(value, trained_tensors, allow_unused=True)
    pairs = zip(trained, gradients, strict=True)
    return [index for index, gradient in pairs if gradient is not None]


def _error_message(error: Exception) -> str:
    location = source_location.find_model_line(traceback.extract_tb(error.__traceback__))
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    summary = f"{type(error).__name__}{f': {lines[0][:300]}' if lines else ''}"
    where = f" at {location}" if location else ""
    advice = "take out what depends on values, or " if _depends_on_values(error) else ""
    return (
        f"--engine jax cannot capture the step as one graph{where}: "
        f"{summary}; {advice}use --engine inductor, xla or ddp"
    )


def _depends_on_values(error: Exception) -> bool:
    """Return whether Python asked for the value, or the shape, of what is not computed yet."""
    from torch._subclasses import fake_tensor
    from torch.fx.experimental import symbolic_shapes

    return isinstance(
        error,
        (
            fake_tensor.DataDependentOutputException,
            fake_tensor.DynamicOutputShapeException,
            symbolic_shapes.GuardOnDataDependentSymNode,
        ),
    )
