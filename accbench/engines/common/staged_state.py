"""Training state of which each pipeline stage has its part: gathered over the stages, and cut."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accbench.distributed.parameter_shards import StagedTensor
from accbench.engines.common import model_state
from accbench.engines.common.training_state import TrainingState


def merged(
    state: TrainingState, owners: Mapping[str, int], group: dist.ProcessGroup,
    device: torch.device,
) -> TrainingState:  # fmt: skip
    """Return the state of all stages, with a `StagedTensor` for each tensor; all ranks call it.

    Args:
        state: of this rank's stages.
        owners: parameter or buffer of the whole model -> the rank in the group that saves it.
        group: the ranks that have the stages of one model, in order.
        device: where tensors travel.
    """
    of_ranks: list[Any] = [None] * group.size()
    flat = _flat(state)
    metas = {key: (tuple(value.shape), value.dtype) for key, value in flat.items()}
    dist.all_gather_object(of_ranks, metas, group=group)

    def owner_of(key: tuple[str, ...]) -> int:
        first = next(rank for rank, metas in enumerate(of_ranks) if key in metas)
        return owners.get(key[0], first)

    tensors = {}
    for key in sorted({key for metas in of_ranks for key in metas}):
        owner = owner_of(key)
        shape, dtype = of_ranks[owner][key]
        part = flat[key] if owner == group.rank() else None
        tensors[key] = StagedTensor(part, shape, dtype, owner, group, device)
    return _nested(state, tensors)


def shared(state: TrainingState) -> TrainingState:
    """Return what `merged` has returned with whole tensors on all ranks; all ranks call it."""
    return _nested(state, {key: value.share() for key, value in _flat(state).items()})


def _flat(state: TrainingState) -> dict[tuple[str, ...], Any]:
    """Return tensors by (name,) of the model's and (name, key) of the optimizer's."""
    flat: dict[tuple[str, ...], Any] = {(name,): value for name, value in state.model.items()}
    for name, of_parameter in state.optimizer.items():
        flat.update({(name, key): value for key, value in of_parameter.items()})
    return flat


def _nested(state: TrainingState, tensors: Mapping[tuple[str, ...], Any]) -> TrainingState:
    model: dict[str, Any] = {}
    optimizer: dict[str, dict[str, Any]] = {}
    for (name, *keys), value in tensors.items():
        if keys:
            optimizer.setdefault(name, {})[keys[0]] = value
        else:
            model[name] = value
    return dataclasses.replace(state, model=model, optimizer=optimizer)


def own_part(saved: TrainingState, net: nn.Module, owners: Mapping[str, int]) -> TrainingState:
    """Return a whole state without what other stages alone have.

    Args:
        saved: a state of the whole model, in memory or in a file.
        net: this rank's stages.
        owners: as in `merged`.
    """
    elsewhere = owners.keys() - model_state.tensors(net).keys()
    model = {name: value for name, value in saved.model.items() if name not in elsewhere}
    optimizer = {n: state for n, state in saved.optimizer.items() if n not in elsewhere}
    return dataclasses.replace(saved, model=model, optimizer=optimizer)
