"""What engines that step with torch's own optimizers ask of a strategy."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accbench.distributed.mesh import MeshShape
from accbench.distributed.parameter_shards import (
    ParameterShard,
    ShardGroups,
    pinned_like,
    sum_in_buckets,
)
from accbench.distributed.process_group import Topology
from accbench.distributed.replicated_gradients import ReplicatedGradientCheck
from accbench.distributed.strategies import Strategy
from accbench.distributed.tensor_slices import TensorSlice
from accbench.errors import ReductionError, RequestError


class TorchStrategy(Strategy):
    """How the ranks share a step that torch runs; this class itself shards nothing.

    Args:
        topology: the ranks.
        device: this rank's.
    """

    collectives = "process_group"
    builds_in_parts: bool = False
    """Whether ranks keep parts of a model that is built one tensor at a time."""
    is_contiguous: bool = False
    """Whether parameters have to be contiguous, and so none in channels_last."""

    def __init__(self, topology: Topology, device: torch.device) -> None:
        super().__init__(topology)
        self.device = device
        self._shards: dict[str, ParameterShard] = {}

    @property
    def shards(self) -> dict[str, ParameterShard]:
        """Shards by their parameter's first name; empty where ranks step with whole parameters."""
        return self._shards

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model in a form that averages in its backward pass."""
        return model

    def units(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules between whose calls no rank waits, apart from the model's own."""
        return [model]

    def rebuild(self, wrapper: nn.Module) -> None:
        """Rebuild in place what `wrap` returned, after its parameters changed."""

    def before_call(self, model: nn.Module) -> None:
        """Note that a loop of a user's own is about to call what `wrap` returned."""

    def without_reduction(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward passes need not average."""
        return nullcontext()

    def reduce_after_loop(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Average the gradients of a loop of a user's own, where its backward pass has not."""

    def reduce_after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Finish the gradients that the optimizer is about to step with."""

    def after_update(self) -> None:
        """Let the model compute with what the optimizer has stepped."""

    def after_evaluation(self, model: nn.Module) -> None:
        """Release what a forward pass without a backward pass has gathered."""

    def stepped_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return parameter groups with the tensors that this rank's optimizer steps with."""
        return groups

    def share_overflow(self, flags: Sequence[torch.Tensor]) -> None:
        """Set flags, float32 of one element, on all ranks where any rank has set them."""

    def clip(self, parameters: list[torch.Tensor], max_norm: float) -> None:
        """Scale gradients down to an L2 norm over all ranks' parameters; does not wait."""
        nn.utils.clip_grad_norm_(parameters, max_norm)


class ShardingStrategy(TorchStrategy):
    """A strategy whose ranks each step with their rows of the parameters.

    Args:
        topology: the ranks.
        device: this rank's.
        shape: how the ranks are laid out.
        steps_on_host: whether the optimizer steps with copies in host memory, and so keeps its
            state there. Ren et al., ZeRO-Offload, 2021.
    """

    is_contiguous = True

    def __init__(
        self, topology: Topology, device: torch.device, shape: MeshShape, steps_on_host: bool
    ) -> None:
        super().__init__(topology, device)
        self.shape, self.steps_on_host = shape, steps_on_host
        self._host_gradients: dict[str, torch.Tensor] = {}
        self.mesh = shape.device_mesh(device.type)
        self.group: dist.ProcessGroup = self.mesh.get_group("shard")
        """The ranks that have rows of the same tensors."""
        self.tp_group = self.mesh.get_group("tp") if shape.tp > 1 else None
        """The ranks that have slices of the same tensors; None without tensor parallelism."""
        self._replicated: ReplicatedGradientCheck | None = None
        if self.tp_group is not None:
            self._replicated = ReplicatedGradientCheck(self.tp_group, device)
        is_first = shape.coordinates(topology.rank)["replicate"] == 0
        self.groups = ShardGroups(self.group, self.tp_group, is_first)
        self.tensor_slices: Mapping[str, TensorSlice] = {}
        """Parameter -> the part of it that this rank computes with; set before `wrap`."""
        self.of_sequence_parts: frozenset[str] = frozenset()
        """Parameters that a rank uses for a part of the sequence (`--sequence_parallel`)."""
        self.class_slices: Mapping[str, TensorSlice] = {}
        """Parameter -> this rank's part of its classes, where all ranks share them (PartialFC)."""

    def build_shard(
        self, name: str, parameter: nn.Parameter, local: torch.Tensor, rows: slice
    ) -> ParameterShard:
        """Return the shard of a parameter, whose rows `local` is this rank's."""
        in_parameter, resident = local.detach(), None
        if self.steps_on_host and not local.is_meta:
            local, resident = pinned_like(in_parameter), in_parameter
        groups, part = self.groups, self.tensor_slices.get(name)
        if name in self.class_slices:
            groups, part = ShardGroups(self.group, dist.group.WORLD), self.class_slices[name]
        local = nn.Parameter(local.detach(), parameter.requires_grad)
        shard = ParameterShard(parameter, local, rows, groups, part, resident)
        shard.read_parameter()
        return shard

    def move_gradients(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """Give what the optimizer steps with its gradients, and the parameters none.

        Where that is in host memory, the host waits for the device here.

        Raises:
            RequestError: the ranks of `--tp` differ in the gradient of a whole parameter.
        """
        parts = [g for n, g in gradients.items() if g is not None and n in self.of_sequence_parts]
        if self.tp_group is not None and self._replicated is not None:
            sum_in_buckets(parts, self.tp_group)
            self._replicated.check({
                name: gradient for name, gradient in gradients.items()
                if name not in self.tensor_slices and self._shards[name].parameter.requires_grad
            })  # fmt: skip
        for name, gradient in gradients.items():
            shard = self._shards[name]
            if gradient is not None and self.steps_on_host:
                if name not in self._host_gradients:
                    self._host_gradients[name] = pinned_like(gradient)
                gradient = self._host_gradients[name].copy_(gradient, non_blocking=True)
            shard.local.grad = gradient
            shard.parameter.grad = None  # it has moved, and the next step begins without
        self._wait_for_copies()

    def after_update(self) -> None:
        for shard in self._shards.values():
            if shard.parameter.requires_grad:
                shard.write_parameter()
        self._wait_for_copies()

    def _wait_for_copies(self) -> None:
        """Wait until the device has read and written host memory, which is about to change."""
        if self.steps_on_host and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    @property
    def data_topology(self) -> Topology:
        return self.shape.data_topology(self.topology)

    def prove(self) -> None:
        super().prove()
        if self.tp_group is None:
            return
        num_ranks = self.tp_group.size()
        total = torch.full((1,), self.tp_group.rank() + 1.0, device=self.device)
        dist.all_reduce(total, group=self.tp_group)
        expected = num_ranks * (num_ranks + 1) / 2
        if total.item() != expected:
            raise ReductionError(
                f"products are not summed over the {num_ranks} ranks of --tp: "
                f"rank {self.topology.rank} has {total.item()} where {expected} is right"
            )

    def stepped_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        local_of = {id(shard.parameter): shard.local for shard in self.shards.values()}
        return [{**group, "params": [local_of[id(p)] for p in group["params"]]} for group in groups]

    def share_overflow(self, flags: Sequence[torch.Tensor]) -> None:
        for flag in flags:
            shared = flag.to(self.device)
            dist.all_reduce(shared, dist.ReduceOp.MAX)  # of all replicas, or they would part
            flag.copy_(shared)

    def clip(self, parameters: list[torch.Tensor], max_norm: float) -> None:
        total = self.sum_squares(parameters).sqrt()
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total)

    def sum_squares(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of squares of the whole model's gradients, (); does not wait.

        Args:
            parameters: this rank's rows, which have gradients.
        """
        slices = self.tensor_slices or self.class_slices  # classes are not shared out with --tp
        sliced = {id(self.shards[name].local) for name in slices}
        of_slices = [p.grad for p in parameters if p.grad is not None and id(p) in sliced]
        of_wholes = [p.grad for p in parameters if p.grad is not None and id(p) not in sliced]
        norms = [nn.utils.get_total_norm(grads) for grads in (of_slices, of_wholes)]
        squares = torch.stack([norm.to(self.device) ** 2 for norm in norms])
        dist.all_reduce(squares, group=self.group)
        if self.tp_group is not None:
            dist.all_reduce(squares[:1], group=self.tp_group)
        elif self.class_slices:
            dist.all_reduce(squares[:1])
        return squares.sum()


def refuse_unshardable(model: nn.Module) -> None:
    """Check that every parameter has rows of real numbers.

    Raises:
        RequestError: one has not; the message names it.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise RequestError(
                f"--dp_shard, --tp and --offload: the model's {name} is a single number, which has "
                "no rows to shard; make it a tensor of shape (1,), or leave them out"
            )
        if parameter.is_complex():
            raise RequestError(
                f"--dp_shard, --tp and --offload: the model's {name} is complex, which is not "
                "sharded; leave them out"
            )
