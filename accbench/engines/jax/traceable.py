"""Patches of torch and other libraries under which a step can be traced as one graph."""

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
def traceable(model: nn.Module, fused_attention: bool) -> Iterator[None]:
    """Enter all patches that tracing the model needs; results stay the same.

    Args:
        model: to be traced.
        fused_attention: keep attention without dropout as one operation, instead of products and
            a softmax.
    """
    with (
        _cuda_asleep(), _set_exporting_flag(), _inline_reentrant_checkpoints(),
        _patch_cumulative_batchnorms(model), attention_backends(fused_attention),
        model_errors.unlogged(),
    ):  # fmt: skip
        yield


def attention_backends(fused: bool) -> contextlib.AbstractContextManager[None]:
    """Choose how torch computes attention: fused where a CPU can, or as products."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    # The other backends are operations with random states and padding of their own.
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH] if fused else SDPBackend.MATH)


@contextlib.contextmanager
def _cuda_asleep() -> Iterator[None]:
    """Keep torch from starting its own CUDA, which this engine does not compute with.

    Tracing saves the state of CUDA's random numbers and so would take memory of GPU 0 for every
    rank.
    """
    if torch.cuda.is_initialized():  # a model of the user's has started it
        yield
        return
    before = torch.cuda.get_rng_state, torch.cuda.set_rng_state
    torch.cuda.get_rng_state = lambda *_, **__: torch.empty(0, dtype=torch.uint8)
    torch.cuda.set_rng_state = lambda *_, **__: None
    try:
        yield
    finally:
        torch.cuda.get_rng_state, torch.cuda.set_rng_state = before


@contextlib.contextmanager
def _set_exporting_flag() -> Iterator[None]:
    # transformers asks torch.compiler.is_exporting(), and then skips checks of values.
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
def _inline_reentrant_checkpoints() -> Iterator[None]:
    """Replace reentrant checkpoints by plain calls.

    They start a backward pass within a backward pass, which no graph can contain.
    """
    from torch.utils.checkpoint import CheckpointFunction

    def call(function: Callable[..., Any], _preserves: bool, *args: Any) -> Any:
        return function(*args)

    function_class: Any = CheckpointFunction
    function_class.apply = call
    try:
        yield
    finally:
        del CheckpointFunction.apply  # reveals the parent's again


@contextlib.contextmanager
def _patch_cumulative_batchnorms(model: nn.Module) -> Iterator[None]:
    """Patch BatchNorms without momentum to keep the count of batches in a tensor.

    torch reads it into Python, to divide by it.
    """
    modules = [
        module for module in model.modules()
        if isinstance(module, _BatchNorm) and module.momentum is None
        and module.track_running_stats and module.training
    ]  # fmt: skip
    try:
        for module in modules:
            module.forward = partial(_cumulative_batchnorm, module)  # type: ignore[method-assign]
        yield
    finally:
        for module in modules:
            del module.forward


def _cumulative_batchnorm(module: Any, batch: torch.Tensor) -> torch.Tensor:
    """Compute `torch.nn.BatchNorm2d.forward` with the count of batches as a tensor."""
    module._check_input_dim(batch)
    module.num_batches_tracked.add_(1)
    momentum = 1 / module.num_batches_tracked.to(module.running_mean.dtype)
    mean, variance = torch.zeros_like(module.running_mean), torch.ones_like(module.running_var)
    # With a momentum of 1 they become the batch's statistics.
    normalized = functional.batch_norm(
        batch, mean, variance, module.weight, module.bias, True, 1.0, module.eps
    )
    module.running_mean.copy_((1 - momentum) * module.running_mean + momentum * mean)
    module.running_var.copy_((1 - momentum) * module.running_var + momentum * variance)
    return normalized
