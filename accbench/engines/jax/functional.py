"""The loss as a function of every tensor that it reads, to be traced on fake tensors."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from accbench.data import nested
from accbench.engines.common import extra_inputs
from accbench.engines.common.index_ranges import IndexRanges, IndexTracer
from accbench.engines.jax.traceable import traceable
from accbench.errors import RequestError

Tensors = list[torch.Tensor]


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


def compute_loss(
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


def contiguous_clones(tensors: Iterable[torch.Tensor]) -> Tensors:
    """Clone tensors to trace with, because tracing some models counts as writing to them.

    The clones are contiguous: some graphs depend on strides, which JAX does not have.
    """
    layout = torch.contiguous_format
    return [tensor.detach().clone(memory_format=layout) for tensor in tensors]


def trace_index_ranges(
    model: nn.Module, loss: Callable[..., torch.Tensor], batch: Any, autocast: Callable[[], Any]
) -> IndexRanges:
    """Return the ranges in which the indices in the batch must lie."""
    trained = [index for index, p in enumerate(model.parameters()) if p.requires_grad]
    with fake_inputs(trained, model, batch) as (trained_tensors, other_tensors, inputs):
        tracer = IndexTracer(inputs[: len(nested.tensors_of(batch))])
        with tracer:
            compute_loss(
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
    mode = fake_mode(parameters)

    def fake(tensors: Iterable[torch.Tensor]) -> list[Any]:
        return [mode.from_tensor(tensor) for tensor in contiguous_clones(tensors)]

    with traceable(model, fused_attention=False), mode:
        trained_tensors = [
            tensor.requires_grad_() for tensor in fake(parameters[index] for index in trained)
        ]
        yield (
            trained_tensors,
            fake([*others, *buffers]),
            fake([*nested.tensors_of(batch), *extra_inputs.tensors()]),
        )


def fake_mode(tensors: Iterable[torch.Tensor] = ()) -> Any:
    """Return a mode in which tensors are shapes and dtypes alone; real tensors are accepted.

    It is the one of the given tensors, where they are such ones themselves.
    """
    from accbench.engines.jax.kernel_dtypes import KernelDtypeFakeMode

    modes = (t.fake_mode for t in tensors if isinstance(t, FakeTensor))
    return next(modes, None) or KernelDtypeFakeMode()


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
