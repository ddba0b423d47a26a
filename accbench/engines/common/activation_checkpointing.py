"""Activation checkpointing by module class: computed again in the backward pass instead of kept.

Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016; by `torch.utils.checkpoint`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from accbench.data import nested
from accbench.errors import RequestError


class Again(Protocol):
    """What a module is given that is computed again, of what it was given at first."""

    def __call__(self, given: Any, gradient: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """The same values once more: (given, the gradient that has come to the module's end)."""


def apply(net: nn.Module, class_names: Sequence[str], again: Again | None = None) -> None:
    """Have the modules of these classes be computed again, those within them by that as well.

    Args:
        again: for a compiler, which could take what is computed twice for one thing.

    Raises:
        RequestError: the model has no module of such a class; the message lists what it has.
    """
    known = sorted({type(module).__name__ for module in net.modules()})
    unknown = [name for name in class_names if name not in known]
    if unknown:
        raise RequestError(
            f"--checkpoint_modules: the model has no {unknown[0]}; it has {', '.join(known)}"
        )
    _apply(net, set(class_names), again)


def _apply(module: nn.Module, class_names: set[str], again: Again | None) -> None:
    if type(module).__name__ in class_names:
        module.forward = partial(_checkpointed, module.forward, again)
        return
    for child in module.children():
        _apply(child, class_names, again)


def _checkpointed(
    forward: Callable[..., Any], again: Again | None, *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if again is None:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    others: list[Any] = []

    def run(*given: Any, **named: Any) -> Any:
        return forward(*(others.pop() if others else given), **named)

    def before(gradient: torch.Tensor) -> torch.Tensor:
        given, gradient = again(args, gradient)
        others.append(given)
        return gradient

    # To stop early it raises an exception, whose frames keep what was computed again alive.
    with set_checkpoint_early_stop(False):
        out = checkpoint(run, *args, use_reentrant=False, **kwargs)
    last = [tensor for tensor in nested.tensors_of(out) if tensor.requires_grad][-1:]
    for tensor in last:
        tensor.register_hook(before)
    return out
