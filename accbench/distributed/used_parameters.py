"""Which parameters have gradients, where workers may have used different ones."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from accbench.distributed import process_group


def somewhere(parameters: Iterable[nn.Parameter]) -> list[bool]:
    """Whether each has a gradient on some rank; asks all of them."""
    has = torch.tensor([parameter.grad is not None for parameter in parameters])
    return [bool(one) for one in torch.stack(process_group.all_gather_tensor(has)).any(0)]


def with_gradients(parameters: Sequence[nn.Parameter], used: Sequence[bool]) -> list[nn.Parameter]:
    """Those that are used, each with a gradient: zeros where this rank had none."""
    found = [p for p, is_used in zip(parameters, used, strict=True) if is_used]
    for parameter in found:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return found
