"""Parameters that a model reads from a sharded module, rather than calling the module.

FSDP gathers a module's parameters around the module's calls. Elsewhere in a forward pass, as in
`functional.linear(x, self.embed.weight)`, a model would find a DTensor, of which each rank has
rows. Here it finds the whole tensor, whose gradient is reduced to the rows.
"""

import dataclasses
import re
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor, Partial


class Pass:
    """Knows whether a forward or a backward pass of a model is under way.

    Args:
        root: the model, after FSDP has sharded it.
        device: where it computes.
    """

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        self._device, self._is_open = device, False
        self._wholes: dict[tuple[int, bool], torch.Tensor] = {}
        root.register_forward_pre_hook(lambda *_: self._open())
        root.register_forward_hook(lambda module, args, output: self._watch_backward(output))

    def close(self) -> None:
        """End the pass: from now on sharded parameters are read as they are."""
        self._is_open = False
        self._wholes.clear()

    def read(self, parameter: DTensor) -> torch.Tensor:
        """Return a parameter whole if a pass is under way, and as it is otherwise.

        All ranks call it. A pass gathers it once.
        """
        if not self._is_open:
            return parameter
        key = (id(parameter), torch.is_grad_enabled())
        if key not in self._wholes:
            self._wholes[key] = gather(parameter, self._device)
        return self._wholes[key]

    def _open(self) -> None:
        self._wholes.clear()
        self._is_open = True

    def _watch_backward(self, output: object) -> None:
        """Have the pass last until the end of the output's backward pass, if it has one."""
        for tensor in _tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(self._begin_backward)

    def _begin_backward(self, gradient: torch.Tensor) -> None:
        self._is_open = True  # again, if another output's has ended
        Variable._execution_engine.queue_callback(self.close)  # as FSDP and DDP do


def gather(parameter: DTensor, device: torch.device) -> torch.Tensor:
    """Return a whole parameter, whose gradient is averaged over all ranks of the parameter's mesh.

    All ranks call it.
    """
    mesh = parameter.device_mesh
    on_device: Any = parameter.to(device)
    whole: torch.Tensor = on_device.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if whole.requires_grad:
        whole.register_hook(lambda gradient: gradient / mesh.size())
    return whole


class _ReadableModule(nn.Module):
    """A module that FSDP shards by itself, and whose parameters may be read in a pass."""

    model_pass: Pass

    def __getattr__(self, name: str) -> "torch.Tensor | nn.Module":
        value = super().__getattr__(name)
        return self.model_pass.read(value) if isinstance(value, DTensor) else value


def make_readable(modules: Iterable[nn.Module], model_pass: Pass) -> None:
    """Have modules' parameters read whole in a model's passes.

    Args:
        modules: sharded by FSDP, each by itself, and gathered for its calls alone.
        model_pass: of the model that they belong to.
    """
    for module in modules:
        module.model_pass = model_pass  # type: ignore[assignment]
        plain = type(module)
        module.__class__ = type(plain.__name__, (_ReadableModule, plain), {})
        module.register_forward_hook(_gather_for_views)
        # Of what `_gather_for_views` is for.
        message = rf"FSDP2-wrapped module \({re.escape(plain.__name__)}\) returned a view"
        warnings.filterwarnings("ignore", message, UserWarning)


def close_pass(module: nn.Module) -> None:
    """End the pass of the model that a module belongs to, if the module is readable."""
    if isinstance(module, _ReadableModule):
        module.model_pass.close()


def _gather_for_views(module: Any, args: object, output: object) -> None:
    """Gather a module for the backward pass of a view, also where that is changed in place.

    FSDP hooks the gradient of the output itself, which autograd then no longer computes.
    """
    for tensor in _tensors_of(output):
        if tensor._base is not None and tensor._base.requires_grad:
            tensor._base.register_hook(lambda gradient: module.unshard())


def _tensors_of(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a module's output; FSDP looks into the same containers."""
    parts: Iterable[Any] = ()
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        parts = output.values()
    elif isinstance(output, (list, tuple)):
        parts = output
    elif dataclasses.is_dataclass(output):
        parts = [getattr(output, field.name) for field in dataclasses.fields(output)]
    for part in parts:
        yield from _tensors_of(part)
