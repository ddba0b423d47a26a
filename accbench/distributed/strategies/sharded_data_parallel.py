"""Data parallel with sharded state: ZeRO's second and third stage, by torch's FSDP2.

Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, 2020.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from accbench.distributed import parameter_shards, used_parameters
from accbench.distributed.mesh import MeshShape
from accbench.distributed.parameter_shards import ParameterShard
from accbench.distributed.process_group import Topology
from accbench.distributed.strategies import read_parameters
from accbench.distributed.strategies.torch_strategy import ShardingStrategy, refuse_unshardable
from accbench.errors import RequestError


class ShardedDataParallel(ShardingStrategy):
    """Each rank has rows of every parameter, and gathers a block's before it computes with them.

    With several replicas (HSDP) ranks of one replica shard, and gradients are averaged over all.

    Args:
        topology: the ranks.
        device: this rank's.
        shape: how the ranks are laid out.
        keeps_gathered: whether parameters stay gathered until the backward pass (ZeRO's second
            stage) rather than being gathered again there (the third).
        steps_on_host: see the base class.
        offloads_parameters: whether parameters too lie in host memory, and each block is copied to
            the device before it is gathered.
    """

    shards_parameters = True
    builds_in_parts = True

    def __init__(
        self, topology: Topology, device: torch.device, shape: MeshShape, keeps_gathered: bool,
        steps_on_host: bool = False, offloads_parameters: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(topology, device, shape, steps_on_host)
        self.keeps_gathered, self.offloads_parameters = keeps_gathered, offloads_parameters
        names = ("replicate", "shard") if shape.replicate > 1 else ("shard",)
        self._data_mesh = self.mesh[names]

    def wrap(self, model: nn.Module) -> nn.Module:
        """Shard a model in place: block by block, and large embeddings and heads by themselves.

        Raises:
            RequestError: it has a parameter that cannot be sharded.
        """
        refuse_unshardable(model)
        inner = blocks(model)
        # Where all stay gathered until the backward pass, no memory is saved by that.
        ends = [] if self.keeps_gathered else large_ends(model, inner)
        self._fully_shard(model, [*inner, *ends])
        if ends:
            read_parameters.make_readable(ends, read_parameters.Pass(model, self.device))
        self.find_shards(model)
        return model

    def units(self, model: nn.Module) -> list[nn.Module]:
        """See the base class."""
        return blocks(model) or [model]

    def set_whole(self, model: nn.Module, name: str, whole: torch.Tensor) -> None:
        """Give a parameter that was sharded on the device meta its rows of a whole tensor."""
        meta: Any = dict(model.named_parameters())[name]
        if name in self.tensor_slices:
            whole = self.tensor_slices[name].cut(whole)
        rows = parameter_shards.rows_of_rank(len(meta), self.group.rank(), self.group.size())
        device = "cpu" if self.offloads_parameters else self.device
        part = DTensor.from_local(
            whole[rows].to(device, copy=True), meta.device_mesh, meta.placements,
            run_check=False, shape=meta.shape, stride=meta.stride(),
        )  # fmt: skip
        parameter = nn.Parameter(part, meta.requires_grad)
        for module in model.modules():
            for key, other in module._parameters.items():
                if other is meta:
                    module._parameters[key] = parameter

    def find_shards(self, model: nn.Module) -> None:
        """Find this rank's rows, again after `set_whole`."""
        self._shards = {}
        rank, num_ranks = self.group.rank(), self.group.size()
        for name, parameter in model.named_parameters():
            rows = parameter_shards.rows_of_rank(len(parameter), rank, num_ranks)
            local: Any = parameter.to_local()  # type: ignore[attr-defined]
            self._shards[name] = self.build_shard(name, parameter, local, rows)

    @property
    def shards(self) -> dict[str, ParameterShard]:
        """See the base class."""
        for shard in self._shards.values():
            # FSDP pads uneven rows once more in the first forward pass, in memory of their own.
            local: Any = shard.parameter.to_local()  # type: ignore[attr-defined]
            if local.data_ptr() != shard.in_parameter.data_ptr():
                shard.in_parameter.data = local.detach()
        return self._shards

    def _fully_shard(self, model: nn.Module, inner: Sequence[nn.Module]) -> None:
        for module in (*inner, model):
            # The root's own parameters stay gathered, for the backward pass begins with them.
            again = not self.keeps_gathered and module is not model
            fully_shard(
                module, mesh=self._data_mesh, reshard_after_forward=again,
                offload_policy=self._offload_policy(),
            )  # fmt: skip
        if self.device.type == "cpu":
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    # Asked to average, gloo's reduce_scatter sums (torch 2.8).
                    module.set_force_sum_reduction_for_comms(True)

    def _offload_policy(self) -> OffloadPolicy:
        if self.offloads_parameters:
            return CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        return OffloadPolicy()

    def without_reduction(self, model: nn.Module) -> AbstractContextManager[Any]:
        return nullcontext()  # a micro-batch's whole gradients would have to be kept

    def reduce_after_loop(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Check that FSDP has averaged all gradients of a loop of a user's own.

        Raises:
            RequestError: there is one of a parameter that came after `wrap`.
        """
        if self.topology.world_size == 1:
            return
        for parameter in used_parameters.of_loop(model, optimizer):
            if parameter.grad is not None and not isinstance(parameter, DTensor):
                raise RequestError(
                    f"a parameter of shape {tuple(parameter.shape)} came after "
                    "accbench.accelerate, and --dp_shard averages no gradients of it: add it to "
                    "the model before, or leave --dp_shard out"
                )

    def reduce_after_step(self, optimizer: torch.optim.Optimizer) -> None:
        gradients: dict[str, Any] = {n: shard.parameter.grad for n, shard in self.shards.items()}
        self.move_gradients({
            name: None if gradient is None else gradient.to_local()
            for name, gradient in gradients.items()
        })  # fmt: skip

    def after_evaluation(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
                read_parameters.close_pass(module)

    def average_probe(self, value: float) -> list[float]:
        size = self.topology.world_size
        probe = nn.Linear(2, size, bias=False).to(self.device)
        self._fully_shard(probe, [])
        probe(torch.full((1, 2), value, device=self.device)).sum().backward()
        gradient: Any = probe.weight.grad
        whole = parameter_shards.all_gather_rows(gradient.to_local(), (size, 2), self.group)
        averaged: list[float] = whole.flatten().tolist()
        return averaged


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that are gathered one at a time: repeated modules, the outermost ones.

    A block is one of several modules of one class in a ModuleList or Sequential, whose parameters
    no module outside of it has as well.
    """
    return _apart(model, _repeated(model))


def large_ends(model: nn.Module, inner: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules outside of blocks that are gathered by themselves: embeddings and heads.

    Such a module has no modules in it, at least as many parameters as the largest block, and none
    that another module has as well. In a model without blocks there are none.

    Args:
        model: the model.
        inner: its blocks.
    """
    in_blocks = {module for block in inner for module in block.modules()}
    least = max(map(_num_parameters, inner), default=0)
    large = [
        module
        for module in model.modules()
        if module not in in_blocks
        and module is not model
        and not [*module.children()]
        and _num_parameters(module) >= least > 0
    ]
    return _apart(model, large)


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _apart(model: nn.Module, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return those modules that have parameters, and share none with others of the model."""
    users = _users(model)
    return [
        module
        for module in modules
        if (own := _users(module)) and all(users[key] == number for key, number in own.items())
    ]


def _users(module: nn.Module) -> dict[int, int]:
    """Return the number of modules that have a parameter, by its id."""
    users: dict[int, int] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    return users


def _repeated(module: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    children = [*module.children()]
    for child in children:
        alike = sum(type(other) is type(child) for other in children)
        is_container = isinstance(module, (nn.ModuleList, nn.Sequential))
        if is_container and alike > 1 and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            found.append(child)
        else:
            found += _repeated(child)
    return found
