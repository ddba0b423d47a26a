"""What torch and other libraries must do a little otherwise for a step to be one graph."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from accbench.engines.common import model_errors


@contextlib.contextmanager
def traceable(model: nn.Module, whole_attention: bool) -> Iterator[None]:
    """The model is to be traced in this; it computes the same.

    Args:
        whole_attention: attention without dropout is one operation, not products and a softmax.
    """
    with (
        _exporting(), _without_reentrance(), _cumulative_batchnorms(model),
        attention(whole_attention), model_errors.unlogged(),
    ):  # fmt: skip
        yield


def attention(whole: bool) -> contextlib.AbstractContextManager[None]:
    """What torch makes of attention: for a CPU one operation, where that can be, or products."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    # The others are operations with random states and paddings of their own.
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH] if whole else SDPBackend.MATH)


@contextlib.contextmanager
def _exporting() -> Iterator[None]:
    # transformers asks torch.compiler.is_exporting(), and then leaves out what looks at values.
    name = "_is_exporting_flag"
    before = getattr(torch.compiler, name, None)
    if before is None:
        yield
        return
    try:
        setattr(torch.compiler, name, True)
        yield
    finally:
        setattr(torch.compiler, name, before)


@contextlib.contextmanager
def _without_reentrance() -> Iterator[None]:
    """Reentrant checkpoints start a backward pass within one, which no graph has: plain calls."""
    from torch.utils.checkpoint import CheckpointFunction

    def call(function: Callable[..., Any], _preserves: bool, *args: Any) -> Any:
        return function(*args)

    CheckpointFunction.apply = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        del CheckpointFunction.apply  # its parent's is there again


@contextlib.contextmanager
def _cumulative_batchnorms(model: nn.Module) -> Iterator[None]:
    """Where momentum is None torch reads the count of batches into Python, to divide by it."""
    found = [
        module for module in model.modules()
        if isinstance(module, _BatchNorm) and module.momentum is None
        and module.track_running_stats and module.training
    ]  # fmt: skip
    try:
        for module in found:
            module.forward = partial(_cumulative, module)  # type: ignore[method-assign]
        yield
    finally:
        for module in found:
            del module.forward


def _cumulative(module: Any, given: torch.Tensor) -> torch.Tensor:
    """As `torch.nn.BatchNorm2d.forward` does it, the count remaining a tensor."""
    module._check_input_dim(given)
    module.num_batches_tracked.add_(1)
    part = 1 / module.num_batches_tracked.to(module.running_mean.dtype)
    mean, variance = torch.zeros_like(module.running_mean), torch.ones_like(module.running_var)
    # With a momentum of 1 they become the batch's own.
    out = functional.batch_norm(
        given, mean, variance, module.weight, module.bias, True, 1.0, module.eps
    )
    module.running_mean.copy_((1 - part) * module.running_mean + part * mean)
    module.running_var.copy_((1 - part) * module.running_var + part * variance)
    return out
