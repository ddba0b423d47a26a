"""Training state of which each rank has rows: gathered to whole tensors, and cut again."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from accbench.distributed.parameter_shards import ParameterShard, ShardedTensor
from accbench.distributed.strategies.torch_strategy import TorchStrategy
from accbench.distributed.whole_tensors import is_sharded, own_shard
from accbench.engines.common import model_state, tensor_parallel, training_state
from accbench.engines.common.optimizer_state import AVERAGE
from accbench.engines.common.training_state import Tensors, TrainingState

Shards = Mapping[str, ParameterShard]


def read_gathered(
    net: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, shards: Shards
) -> TrainingState:
    """Read the current state as whole tensors on every rank; all ranks call it."""
    return _read(net, optimizer, scaler, shards, lambda shard, rows: shard.all_gather(rows).cpu())


def read_to_gather(
    net: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, shards: Shards
) -> TrainingState:
    """Read the current state with a `ShardedTensor` for each tensor that is sharded."""
    return _read(net, optimizer, scaler, shards, lambda shard, rows: ShardedTensor(rows, shard))


def _read(
    net: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, shards: Shards,
    gather: Callable[[ParameterShard, torch.Tensor], Any],
) -> TrainingState:  # fmt: skip
    """Read the current state.

    Args:
        net: the model that was sharded.
        optimizer: of the shards' rows.
        scaler: the GradScaler, or None.
        shards: by parameter name.
        gather: called with a shard and a rank's rows, returns what stands for the whole.
    """

    def whole(shard: ParameterShard, value: torch.Tensor) -> Any:
        if shard.is_like(value):
            return gather(shard, value.detach())
        return value.detach().to("cpu", copy=True)

    model: Tensors = {}
    of_rank = tensor_parallel.rank_buffers(net)
    for name, tensor in model_state.tensors(net).items():
        if name in of_rank:
            continue
        shard = shards.get(name)
        model[name] = (
            tensor.detach().to("cpu", copy=True) if shard is None else whole(shard, shard.local)
        )
    states = {
        name: {
            key: whole(shard, own_shard(value))
            for key, value in optimizer.state[stepped].items()
            if isinstance(value, torch.Tensor)
        }
        for name, shard in shards.items()
        for stepped in (shard.local, shard.parameter)  # the latter by scripts' optimizers
        if stepped in optimizer.state
    }
    return TrainingState(
        model, states, training_state.read_scaler(scaler), model_state.read_extra(net)
    )


def load(
    net: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, shards: Shards,
    saved: TrainingState,
) -> None:  # fmt: skip
    """Load a whole state, in memory or in a file, of which each rank takes its rows.

    A script's optimizer steps with the model's parameters, and cuts what it loads by itself.

    Raises:
        NotLoadableError: model or optimizer have other tensors.
    """
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    takes_wholes = any(
        is_sharded(shard.parameter) and id(shard.parameter) in stepped for shard in shards.values()
    )
    model = {
        name: _as_parameter(shards[name], value) if name in shards else in_memory(value)
        for name, value in saved.model.items()
    }
    current = model_state.tensors(net)
    model |= {name: current[name] for name in tensor_parallel.rank_buffers(net)}
    states = {
        name: {
            key: shards[name].cut(value)
            if name in shards and not takes_wholes and tuple(value.shape) == shards[name].shape
            else in_memory(value)
            for key, value in state.items()
        }
        for name, state in saved.optimizer.items()
    }
    local_names = {id(shard.local): name for name, shard in shards.items()}
    if takes_wholes:
        local_names = {id(shard.parameter): name for name, shard in shards.items()}
    training_state.load(
        net, optimizer, scaler, dataclasses.replace(saved, model=model, optimizer=states),
        local_names,
    )  # fmt: skip
    for shard in shards.values():
        shard.read_parameter()


def in_memory(value: Any) -> torch.Tensor:
    """Return a tensor, or a file's, as a tensor."""
    tensor: torch.Tensor = value if isinstance(value, torch.Tensor) else value.read()
    return tensor


def _as_parameter(shard: ParameterShard, whole: Any) -> torch.Tensor:
    """Return a whole tensor in the form in which the model has the parameter."""
    from torch.distributed.tensor import DTensor  # half a second, which a launcher does not spend

    parameter: Any = shard.parameter
    if tuple(whole.shape) != shard.shape:
        return in_memory(whole)
    if not isinstance(parameter, DTensor):
        part = shard.tensor_slice
        return in_memory(whole) if part is None else part.cut(whole)
    rows = shard.cut(whole).to(shard.in_parameter.device, shard.local.dtype)
    return DTensor.from_local(
        rows, parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip


class ShardedAverages(nn.Module):
    """A model that computes with the averages of its sharded parameters.

    They stand in the parameters' place for each call, as no rank has all of them.
    """

    def __init__(
        self, net: nn.Module, optimizer: torch.optim.Optimizer, strategy: TorchStrategy
    ) -> None:
        super().__init__()
        self.net, self._optimizer, self._strategy = net, optimizer, strategy

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        kept = {n: shard.local.clone() for n, shard in self._strategy.shards.items()}
        self._put({
            name: self._optimizer.state[shard.local].get(AVERAGE, kept[name])
            for name, shard in self._strategy.shards.items()
        })  # fmt: skip
        try:
            return self.net(*args, **kwargs)
        finally:
            self._strategy.after_evaluation(self.net)
            self._put(kept)

    def _put(self, rows: Tensors) -> None:
        for name, shard in self._strategy.shards.items():
            shard.local.copy_(rows[name])
        self._strategy.after_update()
