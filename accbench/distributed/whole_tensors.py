"""Whole tensors in and out of a model whose parameters torch keeps in shards (DTensor).

A loop of a user's own has such a model with `--dp_shard`: its optimizer steps with the shards, and
its files hold whole tensors.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or the whole of one in shards, which all ranks then gather together."""
    whole: torch.Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return whole


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether each rank has a shard of a tensor."""
    return hasattr(tensor, "placements")  # DTensor's, whose import takes half a second


def own_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor, or a tensor that is in no shards as it is."""
    shard: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return shard


def accept_whole_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Have both's `load_state_dict` take whole tensors, of which each rank keeps its shard.

    Args:
        model: with parameters in shards.
        optimizer: of them.
    """

    def cut_parameters(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for key, parameter in module._parameters.items():
            if parameter is not None and prefix + key in state_dict:
                state_dict[prefix + key] = _cut_like(state_dict[prefix + key], parameter)

    def cut_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        saved = _parameters_of(state_dict["param_groups"])
        parameters = dict(zip(saved, _parameters_of(optimizer.param_groups), strict=False))
        state = {
            index: {key: _cut_like(value, parameters[index]) for key, value in values.items()}
            if index in parameters
            else values
            for index, values in state_dict["state"].items()
        }
        return {**state_dict, "state": state}

    for module in model.modules():
        module.register_load_state_dict_pre_hook(cut_parameters)
    optimizer.register_load_state_dict_pre_hook(cut_state)


def _parameters_of(groups: list[dict[str, Any]]) -> Iterator[Any]:
    return itertools.chain.from_iterable(group["params"] for group in groups)


def _cut_like(value: Any, parameter: torch.Tensor) -> Any:
    """Return this rank's shard of a whole tensor of the parameter's shape; all else as it is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    is_whole = isinstance(value, torch.Tensor) and not is_sharded(value)
    if not (is_whole and isinstance(parameter, DTensor) and value.shape == parameter.shape):
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(value.detach(), mesh, placements, src_data_rank=None)
