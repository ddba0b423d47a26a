"""The parameters that a loop trains, and gradients of those that only some ranks have used."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from accbench.distributed import process_group


def of_loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    """Yield what a loop of a user's own may train, in the same order on all ranks.

    It may have further optimizers, each of some of the model's parameters: all of these come first.
    Parameters follow that the optimizer has besides.
    """
    in_optimizer = (p for group in optimizer.param_groups for p in group["params"])
    yield from dict.fromkeys(model.parameters()) | dict.fromkeys(in_optimizer)


@torch.no_grad()
def share_new(parameters: Iterable[nn.Parameter], known: set[nn.Parameter]) -> None:
    """Give parameters that are not known yet rank 0's values; all ranks call this.

    Args:
        parameters: in the same order on all ranks.
        known: those that have had rank 0's values; the new ones are added.
    """
    for parameter in parameters:
        if parameter not in known:
            known.add(parameter)
            parameter.copy_(process_group.broadcast_tensor(parameter.detach().cpu()))


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
