"""Training of complex parameters: optimizers and reductions get real views of them.

torch's optimizers update real and imaginary parts separately, so the result is the same; but fused
optimizers, the loss scale and gloo support real numbers only.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accbench.distributed.complex_numbers import real


def exist_in(net: nn.Module) -> bool:
    """Return whether a network has complex parameters."""
    return any(parameter.is_complex() for parameter in net.parameters())


@contextlib.contextmanager
def as_real(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Replace an optimizer's complex parameters by real views (..., 2) in the block.

    Their gradients and state become real views, too. Views share memory, so that an update of
    them updates the parameters.
    """
    slots = [
        (group["params"], index, parameter)
        for group in optimizer.param_groups
        for index, parameter in enumerate(group["params"])
        if parameter.is_complex()
    ]
    views = [_real_view(parameter) for _, _, parameter in slots]
    for (parameters, index, parameter), view in zip(slots, views, strict=True):
        parameters[index] = view
        _move_state(optimizer, parameter, view, _to_real(parameter))
    try:
        yield
    finally:
        for (parameters, index, parameter), view in zip(slots, views, strict=True):
            parameters[index] = parameter
            _move_state(optimizer, view, parameter, _to_complex(view))


def _real_view(parameter: nn.Parameter) -> nn.Parameter:
    view = nn.Parameter(real(parameter.detach()), requires_grad=parameter.requires_grad)
    if parameter.grad is not None:
        parameter.grad = materialize(parameter.grad)
        view.grad = real(parameter.grad)
    return view


def materialize(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient with pending conjugation and negation applied."""
    return gradient.resolve_conj().resolve_neg()


def _move_state(
    optimizer: torch.optim.Optimizer, old: nn.Parameter, new: nn.Parameter,
    convert: Callable[[Any], Any],
) -> None:  # fmt: skip
    state = optimizer.state.pop(old, None)
    if state is not None:
        optimizer.state[new] = {key: convert(value) for key, value in state.items()}


def _to_real(parameter: nn.Parameter) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        return real(value) if isinstance(value, torch.Tensor) else value

    return convert


def _to_complex(view: nn.Parameter) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        is_view_shaped = isinstance(value, torch.Tensor) and value.shape == view.shape
        return torch.view_as_complex(value) if is_view_shaped else value

    return convert


def build_optimizer(
    optimizer_class: Any, groups: list[dict[str, Any]], **arguments: Any
) -> torch.optim.Optimizer:
    """Build an optimizer with complex parameters, also of a class that refuses them."""
    real_groups = [
        {**group, "params": [_real_view(p) if p.is_complex() else p for p in group["params"]]}
        for group in groups
    ]
    optimizer: torch.optim.Optimizer = optimizer_class(real_groups, **arguments)
    for optimizer_group, group in zip(optimizer.param_groups, groups, strict=True):
        optimizer_group["params"][:] = group["params"]
    return optimizer


def in_optimizer(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the complex parameters of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.is_complex()]


def materialize_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Apply pending conjugations in the gradients of complex parameters."""
    for parameter in in_optimizer(optimizer):
        if parameter.grad is not None:
            parameter.grad = materialize(parameter.grad)


def exclude_from_ddp(net: nn.Module) -> bool:
    """Have DistributedDataParallel ignore complex parameters, which gloo cannot reduce.

    Returns:
        Whether any parameter is left for it to reduce.
    """
    names = [name for name, parameter in net.named_parameters() if parameter.is_complex()]
    if names:
        ignored = {*names, *getattr(net, "_ddp_params_and_buffers_to_ignore", ())}
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, sorted(ignored))
    return any(p.requires_grad and not p.is_complex() for p in net.parameters())
