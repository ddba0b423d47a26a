"""Capture of a training step of a torch module as one graph.

The graph computes the loss, its gradients, and the new values of buffers. torch's own
`aot_export_module` makes it: the joint graph of forward and backward pass in ATen, free of side
effects. That function is private, so it is used here alone. Python's branches are in the graph as
they were taken.
"""

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from accbench.data import nested
from accbench.engines.common import (
    extra_inputs,
    extra_state,
    model_errors,
    model_state,
    python_state,
    source_location,
)
from accbench.engines.common.index_ranges import IndexRanges, IndexTracer
from accbench.engines.jax.traceable import traceable
from accbench.errors import RequestError

Tensors = list[torch.Tensor]
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


class ReshapedBufferError(RequestError):
    """A forward pass replaces a buffer by a tensor of another shape."""


class _LossModule(nn.Module):
    """The loss of a batch as a module, so that `functional_call` can replace tensors."""

    def __init__(self, model: nn.Module, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Any) -> torch.Tensor:
        before = dict(self.model.named_buffers())
        loss = self.loss(self.model, batch)
        for name, buffer in self.model.named_buffers():
            if name in before and buffer is not before[name]:  # it was replaced
                if buffer.shape != before[name].shape:
                    raise ReshapedBufferError(
                        f"--engine jax cannot have the shape of a buffer change in a step, as that "
                        f"of {name} does; make it before training, or use another engine"
                    )
                with torch.no_grad():
                    before[name].copy_(buffer)
        return loss


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
    saved = python_state.PythonSnapshot(model)
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


def build_lazy_buffers(
    model: nn.Module, loss: Callable[..., torch.Tensor], batch: Any,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]],
) -> None:  # fmt: skip
    """Run a forward pass on the host for the buffers that it replaces by new tensors.

    These are tables that a model makes when it first sees a size. Buffers that are written to
    in place are restored.
    """
    before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    with torch.random.fork_rng(devices=()), torch.no_grad(), autocast():
        loss(model, batch)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in before and buffer is before[name][0]:
                buffer.copy_(before[name][1])


def _capture(
    trained: list[int], model: nn.Module, loss: Callable[..., torch.Tensor], batch: Any,
    autocast: Callable[[], Any], decompositions: Any, fused_attention: bool,
) -> CapturedStep:  # fmt: skip
    from torch._functorch.aot_autograd import aot_export_module

    parameters, buffers = list(model.parameters()), list(model.buffers())
    others = [p for index, p in enumerate(parameters) if index not in set(trained)]
    reads: list[int] = []

    def functional(
        trained_tensors: Tensors, other_tensors: Tensors, inputs: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        value, reads[:] = functional_loss(
            model, loss, batch, autocast, trained, trained_tensors, other_tensors, inputs
        )
        return value

    inputs = _contiguous_clones(
        [torch.ones(()), *nested.tensors_of(batch), *extra_inputs.tensors()]
    )
    trained_tensors = _contiguous_clones(parameters[index] for index in trained)
    holder = _FunctionalLoss(trained_tensors, _contiguous_clones([*others, *buffers]), functional)
    watch, saved = python_state.PythonStateWatch(model), python_state.PythonSnapshot(model)
    before = python_state.numbers_in(watch.state())
    # Tensors that are plain attributes of the model become constants of the graph.
    with traceable(model, fused_attention), _fake_mode():
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
        with python_state.restored(model):
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
    with fake_inputs(trained, model, batch) as (trained_tensors, other_tensors, inputs):
        functional_loss(
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
        build_lazy_buffers(model, loss, batch, autocast)
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

    def functional(
        _: Tensors, other_tensors: Tensors, inputs: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        return functional_loss(model, score, batch, autocast, [], [], other_tensors, inputs)[0]

    holder = _FunctionalScore(
        [], _contiguous_clones([*model.parameters(), *model.buffers()]), functional
    )
    inputs = _contiguous_clones([*nested.tensors_of(batch), *extra_inputs.tensors()])
    try:
        with torch.no_grad(), traceable(model, fused_attention=False), _fake_mode():
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


def _contiguous_clones(tensors: Iterable[torch.Tensor]) -> Tensors:
    """Clone tensors to trace with, because tracing some models counts as writing to them.

    The clones are contiguous: some graphs depend on strides, which JAX does not have.
    """
    layout = torch.contiguous_format
    return [tensor.detach().clone(memory_format=layout) for tensor in tensors]


def functional_loss(
    model: nn.Module, loss: Callable[..., torch.Tensor], batch: Any, autocast: Callable[[], Any],
    trained: list[int], trained_tensors: Sequence[torch.Tensor],
    other_tensors: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, list[int]]:  # fmt: skip
    """Compute the loss with other tensors in the place of all that the model has and is given.

    Returns:
        The loss, and how many tensors were read of each source of extra inputs.
    """
    num_others = sum(1 for _ in model.parameters()) - len(trained)
    trained_by_index = dict(zip(trained, trained_tensors, strict=True))
    others = iter(other_tensors[:num_others])
    tensors = {
        f"model.{name}": trained_by_index[index] if index in trained_by_index else next(others)
        for index, (name, _) in enumerate(model.named_parameters())
    }
    names = (name for name, _ in model.named_buffers())
    tensors |= {f"model.{n}": b for n, b in zip(names, other_tensors[num_others:], strict=True)}
    num_in_batch = len(nested.tensors_of(batch))
    new_batch = nested.with_tensors(batch, inputs[:num_in_batch])
    # In here, not around the export: the backward pass runs outside of autocast.
    with autocast(), extra_inputs.replaced(list(inputs[num_in_batch:])) as reads:
        value: torch.Tensor = torch.func.functional_call(
            _LossModule(model, loss), tensors, (new_batch,)
        )
    return value, reads


def _params_with_gradient(
    trained: list[int], model: nn.Module, loss: Callable[..., torch.Tensor], batch: Any,
    autocast: Callable[[], Any],
) -> list[int]:  # fmt: skip
    """Return those of `trained` that the loss depends on; torch exports no graph with others."""
    with fake_inputs(trained, model, batch) as (trained_tensors, other_tensors, inputs):
        value, _ = functional_loss(
            model, loss, batch, autocast, trained, trained_tensors, other_tensors, inputs
        )
        gradients = torch.autograd.grad(value, trained_tensors, allow_unused=True)
    pairs = zip(trained, gradients, strict=True)
    return [index for index, gradient in pairs if gradient is not None]


def trace_index_ranges(
    model: nn.Module, loss: Callable[..., torch.Tensor], batch: Any, autocast: Callable[[], Any]
) -> IndexRanges:
    """Return the ranges in which the indices in the batch must lie."""
    trained = [index for index, p in enumerate(model.parameters()) if p.requires_grad]
    with fake_inputs(trained, model, batch) as (trained_tensors, other_tensors, inputs):
        tracer = IndexTracer(inputs[: len(nested.tensors_of(batch))])
        with tracer:
            functional_loss(
                model, loss, batch, autocast, trained, trained_tensors, other_tensors, inputs
            )
    return tracer.log.ranges()


@contextlib.contextmanager
def fake_inputs(trained: list[int], model: nn.Module, batch: Any) -> Iterator[tuple[Tensors, ...]]:
    """Yield fake tensors for all that a step reads, and let the step be run on them.

    They are the parameters of `trained`; other parameters and buffers; the batch's tensors and
    the extra inputs.
    """
    parameters, buffers = list(model.parameters()), list(model.buffers())
    others = [p for index, p in enumerate(parameters) if index not in set(trained)]
    mode = _fake_mode()

    def fake(tensors: Iterable[torch.Tensor]) -> list[Any]:
        return [mode.from_tensor(tensor) for tensor in _contiguous_clones(tensors)]

    with traceable(model, fused_attention=False), mode:
        trained_tensors = [
            tensor.requires_grad_() for tensor in fake(parameters[index] for index in trained)
        ]
        yield (
            trained_tensors,
            fake([*others, *buffers]),
            fake([*nested.tensors_of(batch), *extra_inputs.tensors()]),
        )


def _fake_mode() -> Any:
    """Return a mode in which tensors are shapes and dtypes alone; real tensors are accepted."""
    from accbench.engines.jax.kernel_dtypes import KernelDtypeFakeMode

    return KernelDtypeFakeMode()


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
