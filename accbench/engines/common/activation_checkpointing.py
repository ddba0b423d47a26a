"""Activation checkpointing by module class: backward recomputes activations.

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


class RecomputeBarrier(Protocol):
    """A function that hides from a compiler that a module's inputs were used before."""

    def __call__(self, inputs: Any, gradient: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Return copies of (a module's inputs, the gradient that has reached its output)."""


def apply(
    net: nn.Module, class_names: Sequence[str], recompute_barrier: RecomputeBarrier | None = None
) -> None:
    """Checkpoint the modules of these classes, including the modules within them.

    Args:
        net: changed in place.
        class_names: names of module classes.
        recompute_barrier: for a compiler, which could merge the recomputation with the first one.

    Raises:
        RequestError: the model has no module of such a class; the message lists what it has.
    """
    class_names_in_net = sorted({type(module).__name__ for module in net.modules()})
    unknown = [name for name in class_names if name not in class_names_in_net]
    if unknown:
        raise RequestError(
            f"--checkpoint_modules: the model has no {unknown[0]}; "
            f"it has {', '.join(class_names_in_net)}"
        )
    _apply(net, set(class_names), recompute_barrier)


def _apply(
    module: nn.Module, class_names: set[str], recompute_barrier: RecomputeBarrier | None
) -> None:
    if type(module).__name__ in class_names:
        module.forward = partial(_checkpointed, module.forward, recompute_barrier)
        return
    for child in module.children():
        _apply(child, class_names, recompute_barrier)


def _checkpointed(
    forward: Callable[..., Any],
    recompute_barrier: RecomputeBarrier | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if recompute_barrier is None:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    copied_inputs: list[Any] = []

    def run(*inputs: Any, **kwargs_of_run: Any) -> Any:
        return forward(*(copied_inputs.pop() if copied_inputs else inputs), **kwargs_of_run)

    def copy_inputs(gradient: torch.Tensor) -> torch.Tensor:
        inputs, gradient = recompute_barrier(args, gradient)
        copied_inputs.append(inputs)
        return gradient

    # An early stop is an exception, whose frames keep recomputed activations alive.
    with set_checkpoint_early_stop(False):
        outputs = checkpoint(run, *args, use_reentrant=False, **kwargs)
    last = [tensor for tensor in nested.tensors_of(outputs) if tensor.requires_grad][-1:]
    for tensor in last:
        tensor.register_hook(copy_inputs)
    return outputs
