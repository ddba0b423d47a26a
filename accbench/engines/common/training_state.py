"""The state of training in one form for all engines: reading and loading it.

Names are those of the module that `Engine.prepare` was given, and every tensor is on the
host, so that one engine can load what another has read.
"""

import dataclasses
from typing import Any

import torch
from torch import nn

from accbench.distributed.whole_tensors import is_sharded
from accbench.engines.common import model_state

Tensors = dict[str, torch.Tensor]


class NotLoadableError(Exception):
    """An engine cannot load a state; the message says what of it."""


@dataclasses.dataclass(frozen=True)
class TrainingState:
    """A snapshot of training: tensors on the host that nobody else writes to."""

    model: Tensors
    """Parameters and buffers by name, each tensor once, also buffers that are not saved."""
    optimizer: dict[str, Tensors]
    """Parameter -> what the optimizer keeps of it, as `step` () and `exp_avg` of its shape."""
    scaler: dict[str, float] = dataclasses.field(default_factory=dict)
    """`scale` and `growth_tracker` of the GradScaler; empty without one."""
    extra: dict[str, Any] | None = None
    """What the model's state_dict holds beside tensors of `model`, by its keys; None: unknown, and
    a load leaves it as it is."""


def read(net: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> TrainingState:
    """Read the current state; waits for the device."""
    model = {name: _copy(tensor) for name, tensor in model_state.tensors(net).items()}
    optimizer_tensors = {
        name: {
            key: _copy(value)
            for key, value in optimizer.state[parameter].items()
            if isinstance(value, torch.Tensor)
        }
        for name, parameter in net.named_parameters()
        if parameter in optimizer.state
    }
    return TrainingState(model, optimizer_tensors, read_scaler(scaler), model_state.read_extra(net))


def load(
    net: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, state: TrainingState,
    names: dict[int, str] | None = None,
) -> None:  # fmt: skip
    """Load a state; the optimizer keeps its hyperparameters.

    What the state does not name stays unchanged: additional state of an optimizer, or the moments
    of a parameter without gradients.

    Args:
        net: the model, changed in place.
        optimizer: changed in place.
        scaler: the GradScaler, or None.
        state: what to load.
        names: id of what the optimizer steps with -> parameter name, where that is not the
            parameter itself.

    Raises:
        NotLoadableError: model or optimizer have other tensors.
    """
    try:
        model_state.load(net, state.model, state.extra)
        if names is None:
            names = {id(parameter): name for name, parameter in net.named_parameters()}
        _load_optimizer(names, optimizer, state.optimizer)
        if _is_enabled(scaler) and state.scaler:
            saved = {**scaler.state_dict(), "scale": state.scaler["scale"]}
            saved["_growth_tracker"] = int(state.scaler["growth_tracker"])
            scaler.load_state_dict(saved)
    except (KeyError, ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        why = " ".join(str(error).split())
        raise NotLoadableError(f"{type(error).__name__}: {why}") from error


def _load_optimizer(
    names: dict[int, str], optimizer: torch.optim.Optimizer, parameter_states: dict[str, Tensors]
) -> None:
    state_dict = optimizer.state_dict()
    state, index = dict(state_dict["state"]), 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            tensors = parameter_states.get(names[id(parameter)])
            if tensors is not None:
                copies = {key: _copy_like(tensor, parameter) for key, tensor in tensors.items()}
                state[index] = {**state.get(index, {}), **copies}
            index += 1
    optimizer.load_state_dict({**state_dict, "state": state})


def _copy_like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host with the parameter's memory layout.

    torch keeps the tensor that it loads where device and dtype are right; and fused AdamW goes
    through all of a parameter's tensors in one order, whatever their strides (torch 2.8): with
    a parameter in channels_last and moments that are not, it updates wrongly. A script's optimizer
    of parameters in shards cuts what it loads by itself.
    """
    if is_sharded(parameter) or tensor.shape != parameter.shape:
        return tensor.clone()
    return torch.empty_like(parameter, device="cpu", dtype=tensor.dtype).copy_(tensor)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _is_enabled(scaler: Any) -> bool:
    return scaler is not None and bool(scaler.is_enabled())


def read_scaler(scaler: Any) -> dict[str, float]:
    """Return the state of a GradScaler; empty without one."""
    if not _is_enabled(scaler):
        return {}
    state_dict = scaler.state_dict()
    return {
        "scale": float(state_dict["scale"]),
        "growth_tracker": float(state_dict["_growth_tracker"]),
    }
