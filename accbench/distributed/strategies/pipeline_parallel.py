"""Pipeline parallelism: each rank has some of the model's blocks, and a part of the optimizer.

Gradients are averaged over the ranks that have the same stages when all micro-batches are done.
What several stages have, as it is tied, gets the sum of their gradients (Narayanan et al.,
Efficient Large-Scale Language Model Training on GPU Clusters, 2021). Within a stage ranks may shard
the optimizer's state and cut layers, as without stages.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accbench.distributed.mesh import MeshShape
from accbench.distributed.parameter_shards import sum_in_buckets
from accbench.distributed.process_group import Topology
from accbench.distributed.strategies.data_parallel import DataParallel
from accbench.distributed.strategies.sharded_optimizer import ShardedOptimizer
from accbench.errors import ReductionError, RequestError


class PipelineParallel(ShardedOptimizer):
    """Each rank has some stages of the model, and the optimizer's state of its rows of these.

    Args:
        topology: the ranks.
        device: this rank's.
        shape: how the ranks are laid out.
        data_parallel: of the ranks that have the same stages.
        num_stages: stages of the model.
    """

    builds_in_parts = True

    def __init__(
        self, topology: Topology, device: torch.device, shape: MeshShape,
        data_parallel: DataParallel, num_stages: int,
    ) -> None:  # fmt: skip
        super().__init__(topology, device, shape, False, data_parallel)
        self.num_stages = num_stages
        self.pp_group: dist.ProcessGroup = self.mesh.get_group("pp")
        """The ranks that have the stages of one model, in order."""
        self.own_stages = [*range(self.pp_group.rank(), num_stages, shape.pp)]
        self._blocks: list[nn.Module] = []
        self._shared: dict[str, dist.ProcessGroup] = {}
        self._counted_elsewhere: set[str] = set()

    def take_stages(self, blocks: list[nn.Module], shared: Mapping[str, Sequence[int]]) -> None:
        """Note what a model was cut into, before it is wrapped; all ranks call it.

        Args:
            blocks: this rank's.
            shared: parameter -> the stages that have it.
        """
        self._blocks = blocks
        own, groups = self.pp_group.rank(), dict[tuple[int, ...], dist.ProcessGroup | None]()
        for name, stages in sorted(shared.items()):
            ranks = (*sorted({stage % self.shape.pp for stage in stages}),)
            if len(ranks) == 1:
                continue  # both slots are in one rank's model
            if ranks not in groups:
                lists = [[column[rank] for rank in ranks] for column in self.shape.pp_groups()]
                made: Any = dist.new_subgroups_by_enumeration(lists)[0]
                groups[ranks] = made
            group = groups[ranks]
            if group is not None and own in ranks:
                self._shared[name] = group
                if own != ranks[0]:
                    self._counted_elsewhere.add(name)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Find this rank's rows; the model is not wrapped, as no backward pass averages.

        Raises:
            RequestError: it has a parameter that cannot be sharded.
        """
        self.find_shards(model)
        return model

    def units(self, model: nn.Module) -> list[nn.Module]:
        """See the base class."""
        return self._blocks

    def set_whole(self, model: nn.Module, name: str, whole: torch.Tensor) -> None:
        """Give a parameter on the device meta its values, if it is one of this rank's stages."""
        meta = dict(model.named_parameters()).get(name)
        if meta is None:
            return
        part = self.tensor_slices[name].cut(whole) if name in self.tensor_slices else whole
        parameter = nn.Parameter(part.to(self.device, copy=True), meta.requires_grad)
        for module in model.modules():
            for key, other in module._parameters.items():
                if other is meta:
                    module._parameters[key] = parameter

    def reduce_after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """See the base class."""
        for name, group in self._shared.items():
            parameter = self._shards[name].parameter
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=group)
        if self.data_parallel.topology.world_size > 1:
            self._average([self._gradient(name) for name in self._trained()])
        super().reduce_after_step(optimizer)

    def _trained(self) -> list[str]:
        return [name for name, shard in self._shards.items() if shard.parameter.requires_grad]

    def _gradient(self, name: str) -> torch.Tensor:
        gradient = self._shards[name].parameter.grad
        if gradient is None:
            raise RequestError(
                f"the loss does not depend on the model's {name}; freeze it (requires_grad = "
                "False), as stages with several workers each need every gradient"
            )
        return gradient

    def _average(self, gradients: Sequence[torch.Tensor]) -> None:
        data = self.data_parallel
        assert data.group is not None
        sum_in_buckets(gradients, data.group)
        for gradient in gradients:
            gradient.div_(data.topology.world_size)

    @torch.no_grad()
    def broadcast_in_stage(self, tensor: torch.Tensor) -> None:
        """Give a tensor's values on the first of the ranks with these stages to the others."""
        if self.data_parallel.topology.world_size > 1:
            whole = tensor.contiguous()
            data = whole.view(-1).view(torch.uint8)  # gloo does not support all types
            dist.broadcast(data, group=self.data_parallel.group, group_src=0)
            tensor.copy_(whole)

    def average_probe(self, value: float) -> list[float]:
        probe = torch.full((2,), value, device=self.device)
        self._average([probe])
        return [*map(float, probe)]

    def prove(self) -> None:
        """See the base class; a number goes from stage to stage, too."""
        super().prove()
        rank = self.pp_group.rank()
        passed = torch.zeros(1, device=self.device)
        if rank:
            dist.recv(passed, group=self.pp_group, group_src=rank - 1)
        if passed.item() != rank:
            raise ReductionError(
                f"--pp: rank {self.topology.rank} has {passed.item()} from the stage before, where "
                f"{rank} is right"
            )
        if rank < self.pp_group.size() - 1:
            dist.send(passed + 1, group=self.pp_group, group_dst=rank + 1)

    def sum_squares(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """See the base class."""
        elsewhere = {id(self._shards[name].local) for name in self._counted_elsewhere}
        squares = super().sum_squares([p for p in parameters if id(p) not in elsewhere])
        dist.all_reduce(squares, group=self.pp_group)
        return squares
