"""A training step of a torch module as one graph: the loss, its gradients, and what buffers become.

By torch's own `aot_export_module`: the joint graph of forward and backward pass in ATen, free of
side effects. The function is private, so it is used here alone. Python's branches are in the graph
as they were taken.
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
_NO_GRADIENT = "did not receive a gradient"


@dataclasses.dataclass(frozen=True)
class Captured:
    """A graph of one signature of batches.

    It takes `trained`, then `kept`, the factor, the batch's tensors and those beside it; it gives
    the new values of `mutated`, those of tensors of the batch that were written to, the loss times
    the factor, the loss, and the gradients.
    """

    graph: torch.fx.GraphModule
    trained: list[int]
    """Which parameters have a gradient, by their place among the model's."""
    mutated: list[int]
    """Which buffers are written to, by their place among the model's."""
    num_written: int
    """How many tensors of the batch are written to, which nobody sees."""
    reads: list[int]
    """How many tensors a forward pass reads of each source of `beside`."""

    def inputs(self, parameters: Sequence[Any], buffers: Sequence[Any], *given: Any) -> list[Any]:
        """The graph's, from all parameters and buffers in the model's order, and what follows."""
        trained = set(self.trained)
        others = [p for place, p in enumerate(parameters) if place not in trained]
        return [*(parameters[place] for place in self.trained), *others, *buffers, *given]

    def outputs(self, values: Sequence[Any]) -> tuple[list[Any], Any, list[Any]]:
        """(new values of `mutated`, the loss, gradients of `trained`) from the graph's."""
        num = len(self.mutated)
        loss = num + self.num_written + 1
        return list(values[:num]), values[loss], list(values[loss + 1 :])


class ReshapedBufferError(RequestError):
    """In a forward pass another tensor, of another shape, takes a buffer's place."""


class _Loss(nn.Module):
    """The loss of a batch, in the form in which other tensors can be put into the model."""

    def __init__(self, model: nn.Module, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Any) -> torch.Tensor:
        before = dict(self.model.named_buffers())
        loss = self.loss(self.model, batch)
        for name, buffer in self.model.named_buffers():
            if name in before and buffer is not before[name]:  # another tensor has its place
                if buffer.shape != before[name].shape:
                    raise ReshapedBufferError(
                        f"--engine jax cannot have the shape of a buffer change in a step, as that "
                        f"of {name} does; make it before training, or use another engine"
                    )
                with torch.no_grad():
                    before[name].copy_(buffer)
        return loss


class _Holder(nn.Module):
    """Each tensor of the model once, whatever its names, so that gradients of tied ones add up."""

    def __init__(self, trained: Tensors, kept: Tensors, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.num_trained, self.num_kept, self.loss = len(trained), len(kept), loss
        for place, tensor in enumerate(trained):
            self.register_parameter(f"trained{place}", nn.Parameter(tensor))
        for place, tensor in enumerate(kept):
            self.register_buffer(f"kept{place}", tensor)

    def forward(self, factor: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        trained = [getattr(self, f"trained{place}") for place in range(self.num_trained)]
        kept = [getattr(self, f"kept{place}") for place in range(self.num_kept)]
        loss = self.loss(trained, kept, inputs)
        # Scaled in here, for the backward pass begins at the first result with a gradient of 1.
        return loss * factor, loss.detach()


class _Scores(_Holder):
    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept = [getattr(self, f"kept{place}") for place in range(self.num_kept)]
        return (self.loss([], kept, inputs),)


def capture(
    model: nn.Module, loss: Callable[..., torch.Tensor], batch: Any,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]], decompositions: Any,
    whole_attention: bool = False,
) -> Captured:  # fmt: skip
    """The step of `loss(model, batch)`; `batch` and the model are on the host and only looked at.

    Args:
        autocast: entered around the forward pass.
        decompositions: of operations that the graph must not have, as torch's tables are.
        whole_attention: keep attention without dropout as one operation.

    Raises:
        RequestError: it cannot be one graph; the message has the place in the model.
    """
    parameters = list(model.parameters())
    trained = [place for place, p in enumerate(parameters) if p.requires_grad]
    arguments = model, loss, batch, autocast, decompositions, whole_attention
    saved = python_state.PythonSnapshot(model)
    try:
        try:
            return _capture(trained, *arguments)
        except AssertionError as error:
            if _NO_GRADIENT not in str(error):
                raise
        saved.restore()
        with_gradient = _with_gradient(trained, *arguments[:4])
        saved.restore()
        return _capture(with_gradient, *arguments)
    except (RequestError, MemoryError):
        raise
    except Exception as error:
        saved.restore()
        by_itself = model_errors.error_of_call(
            model, lambda: _loss_and_back(model, loss, batch, autocast, trained)
        )
        if by_itself is not None:
            raise by_itself from None
        raise RequestError(_in_a_line(error)) from error


def _loss_and_back(
    model: nn.Module, loss: Callable[..., torch.Tensor], batch: Any, autocast: Callable[[], Any],
    trained: list[int],
) -> None:  # fmt: skip
    """A step on the host that leaves no gradient."""
    with autocast():
        value = loss(model, batch)
    parameters = [*model.parameters()]
    torch.autograd.grad(value, [parameters[place] for place in trained], allow_unused=True)


def settle(
    model: nn.Module, loss: Callable[..., torch.Tensor], batch: Any,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]],
) -> None:  # fmt: skip
    """A forward pass on the host that leaves nothing but tensors in the place of buffers: tables
    that a model makes when it first sees a size."""
    before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    with torch.random.fork_rng(devices=()), torch.no_grad(), autocast():
        loss(model, batch)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in before and buffer is before[name][0]:
                buffer.copy_(before[name][1])


def _capture(
    trained: list[int], model: nn.Module, loss: Callable[..., torch.Tensor], batch: Any,
    autocast: Callable[[], Any], decompositions: Any, whole_attention: bool,
) -> Captured:  # fmt: skip
    from torch._functorch.aot_autograd import aot_export_module

    parameters, buffers = list(model.parameters()), list(model.buffers())
    others = [p for place, p in enumerate(parameters) if place not in set(trained)]
    reads: list[int] = []

    def of_tensors(some: Tensors, kept: Tensors, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        value, reads[:] = loss_of(model, loss, batch, autocast, trained, some, kept, inputs)
        return value

    inputs = _plain([torch.ones(()), *nested.tensors_of(batch), *extra_inputs.tensors()])
    some = _plain(parameters[place] for place in trained)
    holder = _Holder(some, _plain([*others, *buffers]), of_tensors)
    watch, saved = python_state.PythonStateWatch(model), python_state.PythonSnapshot(model)
    before = python_state.numbers_in(watch.state())
    # Tensors that a model has as plain attributes are constants of the graph.
    with traceable(model, whole_attention), _fake():
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
            _refuse_numbers_that_change(watch, trained, model, loss, batch, autocast)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    mutated = [int(name.removeprefix("kept")) for name in signature.buffers_to_mutate.values()]
    mutated = [place - len(others) for place in mutated]
    num_written = len(signature.user_inputs_to_mutate)
    return Captured(graph, trained, mutated, num_written, reads)


def _refuse_numbers_that_change(
    watch: python_state.PythonStateWatch, trained: list[int], model: nn.Module,
    loss: Callable[..., torch.Tensor], batch: Any, autocast: Callable[[], Any],
) -> None:  # fmt: skip
    """A graph is captured once; raises RequestError if every forward pass changes a number."""
    before = python_state.numbers_in(watch.state())
    with faked(trained, model, batch) as (some, kept, inputs):
        loss_of(model, loss, batch, autocast, trained, some, kept, inputs)
    for name, value in python_state.numbers_in(watch.state()).items():
        if before.get(name, value) != value:
            raise RequestError(
                f"--engine jax captures the step once, and every forward pass changes {name} (now "
                f"{value}): keep it in a buffer, a tensor, or use --engine inductor, xla or ddp"
            )


def refuse_changing_extra_state(
    model: nn.Module, loss: Callable[..., torch.Tensor], batch: Any, autocast: Callable[[], Any]
) -> None:
    """Raise RequestError if every forward pass changes a module's extra state, which is Python's.

    Two passes on the host leave what they make of it, as a first step would; nothing for models
    that have none.
    """
    if model_state.first_with_extra_state(model) is None:
        return
    for is_last in (False, True):
        before = model_state.read_extra(model)
        settle(model, loss, batch, autocast)
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
    """`score(model, batch)` as a graph without gradients.

    It takes parameters, buffers, the batch's tensors and those beside it.

    Raises:
        RequestError: it cannot be one graph, or the model writes to its buffers.
    """
    from torch._functorch.aot_autograd import aot_export_module

    def of_tensors(_: Tensors, kept: Tensors, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return loss_of(model, score, batch, autocast, [], [], kept, inputs)[0]

    holder = _Scores([], _plain([*model.parameters(), *model.buffers()]), of_tensors)
    inputs = _plain([*nested.tensors_of(batch), *extra_inputs.tensors()])
    try:
        with torch.no_grad(), traceable(model, whole_attention=False), _fake():
            graph, signature = aot_export_module(
                holder, inputs, trace_joint=False, decompositions=decompositions
            )
    except (RequestError, MemoryError):
        raise
    except Exception as error:
        raise RequestError(_in_a_line(error)) from error
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
        raise RequestError("the model writes to its buffers or its batch in evaluation")
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _plain(tensors: Iterable[torch.Tensor]) -> Tensors:
    """Copies to be traced with, for some tracing counts as writing.

    Without strides of their own, of which JAX knows nothing, and that some graphs look at.
    """
    plain = torch.contiguous_format
    return [tensor.detach().clone(memory_format=plain) for tensor in tensors]


def loss_of(
    model: nn.Module, loss: Callable[..., torch.Tensor], batch: Any, autocast: Callable[[], Any],
    trained: list[int], some: Sequence[torch.Tensor], kept: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, list[int]]:  # fmt: skip
    """The loss with other tensors in the places of all that the model has and is given.

    And how many were read of each source of `beside`.
    """
    num_others = sum(1 for _ in model.parameters()) - len(trained)
    by_place, others = dict(zip(trained, some, strict=True)), iter(kept[:num_others])
    tensors = {
        f"model.{name}": by_place[place] if place in by_place else next(others)
        for place, (name, _) in enumerate(model.named_parameters())
    }
    names = (name for name, _ in model.named_buffers())
    tensors |= {f"model.{n}": b for n, b in zip(names, kept[num_others:], strict=True)}
    num_in_batch = len(nested.tensors_of(batch))
    given = nested.with_tensors(batch, inputs[:num_in_batch])
    # In here, not around the export: the graph's backward pass runs outside of autocast.
    with autocast(), extra_inputs.replaced(list(inputs[num_in_batch:])) as reads:
        value: torch.Tensor = torch.func.functional_call(_Loss(model, loss), tensors, (given,))
    return value, reads


def _with_gradient(
    trained: list[int], model: nn.Module, loss: Callable[..., torch.Tensor], batch: Any,
    autocast: Callable[[], Any],
) -> list[int]:  # fmt: skip
    """Those of `trained` that the loss depends on, for torch has no graph with others in it."""
    with faked(trained, model, batch) as (some, kept, inputs):
        value, _ = loss_of(model, loss, batch, autocast, trained, some, kept, inputs)
        gradients = torch.autograd.grad(value, some, allow_unused=True)
    pairs = zip(trained, gradients, strict=True)
    return [place for place, gradient in pairs if gradient is not None]


def index_ranges_of(
    model: nn.Module, loss: Callable[..., torch.Tensor], batch: Any, autocast: Callable[[], Any]
) -> IndexRanges:
    """Return what must hold of the batch's tensors for the indices among them to be in range."""
    trained = [place for place, p in enumerate(model.parameters()) if p.requires_grad]
    with faked(trained, model, batch) as (some, kept, inputs):
        tracer = IndexTracer(inputs[: len(nested.tensors_of(batch))])
        with tracer:
            loss_of(model, loss, batch, autocast, trained, some, kept, inputs)
    return tracer.log.ranges()


@contextlib.contextmanager
def faked(trained: list[int], model: nn.Module, batch: Any) -> Iterator[tuple[Tensors, ...]]:
    """Shapes and types in the place of all tensors that a step reads, in which it can be run.

    The parameters of `trained`; other parameters and buffers; the batch's and those beside it.
    """
    parameters, buffers = list(model.parameters()), list(model.buffers())
    others = [p for place, p in enumerate(parameters) if place not in set(trained)]
    mode = _fake()

    def of(tensors: Iterable[torch.Tensor]) -> list[Any]:
        return [mode.from_tensor(tensor) for tensor in _plain(tensors)]

    with traceable(model, whole_attention=False), mode:
        some = [tensor.requires_grad_() for tensor in of(parameters[place] for place in trained)]
        yield (
            some,
            of([*others, *buffers]),
            of([*nested.tensors_of(batch), *extra_inputs.tensors()]),
        )


def _fake() -> Any:
    """Tensors are shapes and types alone in this; those of others are let in."""
    from accbench.engines.jax.noting import Noting

    return Noting()


def _in_a_line(error: Exception) -> str:
    place = source_location.find_model_line(traceback.extract_tb(error.__traceback__))
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    what = f"{type(error).__name__}{f': {lines[0][:300]}' if lines else ''}"
    advice = "take out what depends on values, or " if _depends_on_values(error) else ""
    return (
        f"--engine jax cannot capture the step as one graph{f' at {place}' if place else ''}: "
        f"{what}; {advice}use --engine inductor, xla or ddp"
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
