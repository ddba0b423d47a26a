"""Training complex parameters: optimizers and reductions see them as real ones.

torch's optimizers take the parts of a complex number one by one, so nothing else is computed; but
fused ones, the loss scale and gloo know real numbers alone.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accbench.distributed.complex_numbers import real


def are_in(net: nn.Module) -> bool:
    """Return whether a network has any."""
    return any(parameter.is_complex() for parameter in net.parameters())


@contextlib.contextmanager
def as_real(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Have an optimizer's complex parameters, their gradients and state be real ones, (..., 2).

    They are the same memory, so that what is done to them is done to the parameters.
    """
    pairs = [
        (group["params"], place, parameter)
        for group in optimizer.param_groups
        for place, parameter in enumerate(group["params"])
        if parameter.is_complex()
    ]
    stand_ins = [_stand_in(parameter) for _, _, parameter in pairs]
    for (parameters, place, parameter), stand_in in zip(pairs, stand_ins, strict=True):
        parameters[place] = stand_in
        _move_state(optimizer, parameter, stand_in, _real_of(parameter))
    try:
        yield
    finally:
        for (parameters, place, parameter), stand_in in zip(pairs, stand_ins, strict=True):
            parameters[place] = parameter
            _move_state(optimizer, stand_in, parameter, _complex_of(stand_in))


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    made = nn.Parameter(real(parameter.detach()), requires_grad=parameter.requires_grad)
    if parameter.grad is not None:
        parameter.grad = materialized(parameter.grad)
        made.grad = real(parameter.grad)
    return made


def materialized(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient that nothing is put off of: autograd may leave one yet to be conjugated."""
    return gradient.resolve_conj().resolve_neg()


def _move_state(
    optimizer: torch.optim.Optimizer, old: nn.Parameter, new: nn.Parameter,
    form: Callable[[Any], Any],
) -> None:  # fmt: skip
    state = optimizer.state.pop(old, None)
    if state is not None:
        optimizer.state[new] = {key: form(value) for key, value in state.items()}


def _real_of(parameter: nn.Parameter) -> Callable[[Any], Any]:
    def form(value: Any) -> Any:
        return real(value) if isinstance(value, torch.Tensor) else value

    return form


def _complex_of(stand_in: nn.Parameter) -> Callable[[Any], Any]:
    def form(value: Any) -> Any:
        is_like = isinstance(value, torch.Tensor) and value.shape == stand_in.shape
        return torch.view_as_complex(value) if is_like else value

    return form


def built(kind: Any, groups: list[dict[str, Any]], **arguments: Any) -> torch.optim.Optimizer:
    """Return an optimizer whose class refuses complex parameters, or may do so."""
    given = [{**group, "params": [_stand_in(p) if p.is_complex() else p for p in group["params"]]}
             for group in groups]  # fmt: skip
    optimizer: torch.optim.Optimizer = kind(given, **arguments)
    for made, group in zip(optimizer.param_groups, groups, strict=True):
        made["params"][:] = group["params"]
    return optimizer


def of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the complex parameters of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.is_complex()]


def materialize_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Compute what autograd has put off in the gradients of complex parameters."""
    for parameter in of(optimizer):
        if parameter.grad is not None:
            parameter.grad = materialized(parameter.grad)


def leave_out_of_buckets(net: nn.Module) -> bool:
    """Have DistributedDataParallel leave complex parameters alone, which gloo does not reduce.

    Returns:
        Whether anything is left that it would reduce.
    """
    names = [name for name, parameter in net.named_parameters() if parameter.is_complex()]
    if names:
        ignored = {*names, *getattr(net, "_ddp_params_and_buffers_to_ignore", ())}
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, sorted(ignored))
    return any(p.requires_grad and not p.is_complex() for p in net.parameters())
