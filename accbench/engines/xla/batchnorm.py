"""BatchNorm's running statistics: the variance, which torch_xla 2.8 leaves biased, and cumulative
averages, for which torch asks the host.

PyTorch keeps the variance with Bessel's correction, n / (n - 1) of the batch's own,
for n values a channel (see `torch.nn.BatchNorm2d`). torch_xla keeps the batch's own:
3 % too little where a late layer has 32 values, and evaluation then sees it.

Correcting every step would trace some operations more for every layer. So the buffer
stays as torch_xla has it, and is corrected where it is read: in evaluation and in
`state_dict()`. With c = n / (n - 1), after t steps from the variance v0, the buffer holds
(1 - momentum)^t v0 and the sum of what the batches gave; that sum should be c times as large.

Where momentum is None, torch reads the count of batches into Python to divide by it: every step
would wait, and be another graph. There the layer gets a momentum of 1 and buffers that it fills
with the batch's own statistics, which the device then adds to the average.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def track_unbiased_variance(model: nn.Module, send: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Have the BatchNorm layers of `model` track the unbiased variance.

    The buffer `running_var` itself does not hold it: read it through `state_dict()`; but it does
    in layers whose average is cumulative (momentum None).

    Args:
        send: copies a tensor from the host to the model's device, with nothing left to compute.
    """
    for module in model.modules():
        if not isinstance(module, _BatchNorm) or not module.track_running_stats:
            continue
        if module.momentum is None:
            module.register_forward_pre_hook(_lend_for_one_batch)
            module.register_forward_hook(_average, always_call=True)
        elif module.momentum:
            module._correction = None  # type: ignore[assignment]  # n / (n - 1) of the first batch
            begin_with_loaded = partial(_begin_with_loaded, send)
            begin_with_loaded(module, module.state_dict(), "")
            module.register_forward_pre_hook(_lend)
            # Also after an error, or the layer would lose its buffer.
            module.register_forward_hook(_take_back, always_call=True)
            module.register_state_dict_post_hook(_save_unbiased)
            module.register_load_state_dict_pre_hook(begin_with_loaded)


_STATISTICS = ("running_mean", "running_var")


@torch.no_grad()
def _lend_for_one_batch(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    if not module.training:
        return
    module._own_statistics = {name: module._buffers[name] for name in _STATISTICS}
    for name, own in module._own_statistics.items():
        module._buffers[name] = torch.zeros_like(own)
    module.momentum = 1.0


@torch.no_grad()
def _average(module: Any, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
    own = module.__dict__.pop("_own_statistics", None)
    if own is None:
        return
    of_batch = {name: module._buffers[name] for name in _STATISTICS}
    module._buffers.update(own)
    module.momentum = None
    if output is None:  # the forward pass failed
        return
    of_batch["running_var"] = of_batch["running_var"] * _correction(inputs[0])
    count = module.num_batches_tracked.to(own["running_var"].dtype)  # this batch is in it
    for name, tensor in own.items():
        tensor.add_((of_batch[name] - tensor) / count)


def _begin_with_loaded(
    send: Callable[[torch.Tensor], torch.Tensor],
    module: Any,
    state: Mapping[str, Any],
    prefix: str,
    *_others: Any,
) -> None:
    """Count from the running variance in `state`; without one there (strict=False) go on."""
    variance = state.get(f"{prefix}running_var")
    if variance is not None:
        steps = state.get(f"{prefix}num_batches_tracked", module.num_batches_tracked)
        variance = variance.to(module.running_var.dtype)
        module._at_start = tuple(send(tensor.detach().cpu()) for tensor in (variance, steps))


def _state(module: Any) -> tuple[torch.Tensor, ...]:
    """What `_unbiased` takes: variance, (C,), and steps, now and at the start."""
    return (module.running_var, module.num_batches_tracked, *module._at_start)


def _unbiased(
    module: Any,
    variance: torch.Tensor,
    steps: torch.Tensor,
    variance_at_start: torch.Tensor,
    steps_at_start: torch.Tensor,
) -> torch.Tensor:
    kept = (1 - module.momentum) ** (steps - steps_at_start).float() * variance_at_start
    unbiased: torch.Tensor = module._correction * variance - (module._correction - 1) * kept
    return unbiased


@torch.no_grad()
def _lend(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    """Put another running variance in place for this forward pass where it needs one."""
    own = module.running_var
    if module.training:
        correction = _correction(inputs[0])
        if module._correction is None:
            module._correction = correction
        if correction == module._correction:
            return
        # A batch of another size: what it adds is found by itself, to be scaled.
        lent = torch.zeros_like(own)
    elif module._correction is None:  # nothing was tracked yet
        return
    else:
        lent = _unbiased(module, *_state(module))
    module._own_running_var = own
    module._buffers["running_var"] = lent


@torch.no_grad()
def _take_back(module: Any, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
    own = module.__dict__.pop("_own_running_var", None)
    if own is None:
        return
    lent = module.running_var
    module._buffers["running_var"] = own
    if module.training and output is not None:  # None: the forward pass failed
        scale = _correction(inputs[0]) / module._correction
        own.mul_(1 - module.momentum).add_(lent, alpha=scale)


def _correction(batch: torch.Tensor) -> float:
    num_values = batch.numel() // batch.shape[1]
    return num_values / (num_values - 1) if num_values > 1 else 1.0


def _save_unbiased(module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    if module._correction is None:
        return
    # On the host, so that nothing is left to be computed in the next step's graph.
    unbiased = _unbiased(module, *(tensor.detach().cpu() for tensor in _state(module)))
    state[f"{prefix}running_var"] = unbiased.to(module.running_var.device)
