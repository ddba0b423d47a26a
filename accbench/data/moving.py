"""Moving batches to a device: tensors in containers of every kind, and objects with a `.to`."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from accbench.data import nest_kinds, nested

SendAll = Callable[[list[torch.Tensor]], list[torch.Tensor]]
_DOING = "moved to the device"


class _SendMode(TorchFunctionMode):
    """A mode in which `tensor.to(device)` calls `send`, for objects that move their own tensors."""

    def __init__(self, device: torch.device, send: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.device, self.send = device, send

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.to and isinstance(args[0], torch.Tensor):
            device, dtype, _, memory_format = torch._C._nn._parse_to(
                *args[1:], **{k: v for k, v in kwargs.items() if k != "copy"}
            )
            if device == self.device and dtype is None and memory_format is None:
                return self.send(args[0])
        return func(*args, **kwargs)


def moved(batch: Any, device: torch.device, send: SendAll | None = None) -> Any:
    """Return the batch with all its tensors on the device, each container of its own type.

    An object with its own `.to`, such as a batch of graphs, moves itself by that.

    Args:
        batch: tensors in any nesting, on the host.
        device: where they go.
        send: moves a list of tensors to the device, all of a batch at once; None for
            `tensor.to(device)`.

    Raises:
        RequestError: the batch has an object of another kind that holds tensors.
    """

    def to_device(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.to(device, non_blocking=True) for tensor in tensors]

    send = send or to_device

    def move_itself(thing: Any) -> Any:
        with _SendMode(device, lambda tensor: send([tensor])[0]):
            return _moved_itself(thing, device)

    on_host: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        on_host.append(tensor)
        return tensor

    nested.mapped(batch, note, lambda thing: thing, _DOING)
    sent = iter(send(on_host) if on_host else [])
    return nested.mapped(batch, lambda _: next(sent), move_itself, _DOING)


def _moved_itself(thing: Any, device: torch.device) -> Any:
    holds_tensors = next(nest_kinds.held(thing), None) is not None
    try:
        result = thing.to(device)
    except Exception:
        if holds_tensors:
            raise
        return thing  # its `to` means something else
    return thing if result is None else result  # None: it moved in place
