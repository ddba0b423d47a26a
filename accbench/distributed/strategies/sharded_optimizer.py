"""Data parallel with a sharded optimizer: ZeRO's first stage.

Gradients are averaged by DistributedDataParallel. Each rank then steps with its rows of every
parameter, has moments for these alone, and all ranks gather what the others have stepped. Where
tensor parallelism alone cuts a model, a rank steps with all rows of its parts, and so it does with
`--offload optimizer` alone.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accbench.distributed import parameter_shards
from accbench.distributed.mesh import MeshShape
from accbench.distributed.process_group import Topology
from accbench.distributed.strategies.data_parallel import DataParallel
from accbench.distributed.strategies.torch_strategy import ShardingStrategy, refuse_unshardable


class ShardedOptimizer(ShardingStrategy):
    """Each rank has the whole model, and the optimizer's state of its rows of every parameter.

    Args:
        topology: the ranks.
        device: this rank's.
        shape: how the ranks are laid out.
        steps_on_host: see the base class.
        data_parallel: what averages the gradients.
    """

    def __init__(
        self, topology: Topology, device: torch.device, shape: MeshShape, steps_on_host: bool,
        data_parallel: DataParallel,
    ) -> None:  # fmt: skip
        super().__init__(topology, device, shape, steps_on_host)
        self.data_parallel = data_parallel

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap a model in DistributedDataParallel, and find this rank's rows.

        Raises:
            RequestError: it has a parameter that cannot be sharded.
        """
        self.find_shards(model)
        return self.data_parallel.wrap(model)

    def find_shards(self, model: nn.Module) -> None:
        """Find this rank's rows of every parameter.

        Raises:
            RequestError: it has a parameter that cannot be sharded.
        """
        refuse_unshardable(model)
        # Each rank has other classes, whose gradients it has alone.
        if self.class_slices:
            names: Any = sorted(self.class_slices)
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        rank, num_ranks = self.group.rank(), self.group.size()
        self._shards = {}
        for name, parameter in model.named_parameters():
            rows = parameter_shards.rows_of_rank(len(parameter), rank, num_ranks)
            self._shards[name] = self.build_shard(name, parameter, parameter[rows], rows)

    def without_reduction(self, model: nn.Module) -> AbstractContextManager[Any]:
        return self.data_parallel.without_reduction(model)

    def reduce_after_step(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = {name: shard.parameter.grad for name, shard in self.shards.items()}
        self.move_gradients({
            name: None if gradient is None else gradient[self.shards[name].rows]
            for name, gradient in gradients.items()
        })  # fmt: skip
        self.data_parallel.reduce_after_step(optimizer)

    def after_update(self) -> None:
        super().after_update()
        if self.group.size() == 1:
            return  # it has stepped all rows
        trained = (shard for shard in self.shards.values() if shard.parameter.requires_grad)
        parameter_shards.fill_from_rows(trained, self.group)

    def average_probe(self, value: float) -> list[float]:
        return [*self.data_parallel.average_probe(value)]
