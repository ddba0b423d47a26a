"""Gradients of parameters that only some ranks have used."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from accbench.distributed import process_group


def has_grad_on_any_rank(parameters: Iterable[nn.Parameter]) -> list[bool]:
    """Return for each parameter whether any rank has a gradient of it; all ranks call this."""
    has_grad = torch.tensor([parameter.grad is not None for parameter in parameters])
    return [bool(flag) for flag in torch.stack(process_group.all_gather_tensor(has_grad)).any(0)]


def fill_missing_grads(
    parameters: Sequence[nn.Parameter], used: Sequence[bool]
) -> list[nn.Parameter]:
    """Return the used parameters, after giving zeros to those without a gradient on this rank."""
    used_parameters = [p for p, is_used in zip(parameters, used, strict=True) if is_used]
    for parameter in used_parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return used_parameters
