"""Collectives of a forward pass with their gradients, which engines compile with the model.

They are torch's functional collectives, which all compilers here know, and are waited for at once.
The first three are those of Megatron-LM's tensor parallelism (Shoeybi et al., 2019), those along an
axis those of its sequence parallelism (Korthikanti et al., 2022), `all_to_all` that of
DeepSpeed-Ulysses (Jacobs et al., 2023), the others those of PartialFC (An et al., 2021).
"""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist


@dataclasses.dataclass(frozen=True)
class RankGroup:
    """Ranks that compute one model together."""

    name: str
    """The process group's, for collectives."""
    rank: int
    """This one's."""
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "RankGroup":
        """Return the ranks of a process group."""
        return cls(group.group_name, group.rank(), group.size())


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """Return the type in which autocast computes products of a tensor; None where it is off.

    A step that is captured for a GPU has CPU tensors, and autocast's settings for CUDA.
    """
    for device_type in (x.device.type, "cuda"):
        if torch.is_autocast_enabled(device_type) and x.is_floating_point():
            return torch.get_autocast_dtype(device_type)
    return None


def copy_to_group(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Return what is the same on all ranks; gradients are summed."""
    copied: torch.Tensor = _CopyToGroup.apply(x, group)
    return copied


def reduce_from_group(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Return the sum over the ranks; each has its gradient."""
    reduced: torch.Tensor = _ReduceFromGroup.apply(x, group)
    return reduced


def gather_from_group(
    x: torch.Tensor, rank: torch.Tensor, group: RankGroup, axis: int = -1
) -> torch.Tensor:
    """Return all ranks' parts of an axis; each has the gradient of its part.

    Args:
        x: this rank's part.
        rank: this rank in the group, int64 (); a tensor, so that all ranks compile one graph.
        group: the ranks.
        axis: the axis.
    """
    gathered: torch.Tensor = _GatherFromGroup.apply(x, rank, group, axis)
    return gathered


def part_of_rank(x: torch.Tensor, rank: torch.Tensor, group: RankGroup, axis: int) -> torch.Tensor:
    """Return a rank's part of an axis; see `gather_from_group`."""
    parts = x.unflatten(axis, (group.size, -1))
    axis %= x.dim()
    return parts.index_select(axis, rank[None]).squeeze(axis)


def scatter_along(x: torch.Tensor, rank: torch.Tensor, group: RankGroup, axis: int) -> torch.Tensor:
    """Return this rank's part of what is the same on all ranks; gradients are gathered.

    Args:
        x: the whole.
        rank: see `gather_from_group`.
        group: the ranks.
        axis: which is cut.
    """
    part: torch.Tensor = _ScatterAlong.apply(x, rank, group, axis)
    return part


def all_gather_along(x: torch.Tensor, group: RankGroup, axis: int) -> torch.Tensor:
    """Return all ranks' parts of an axis; each has its part of the sum of the gradients.

    That is the gradient where each rank computes something else with what is gathered.
    """
    gathered: torch.Tensor = _AllGatherAlong.apply(x, group, axis)
    return gathered


def reduce_scatter_along(x: torch.Tensor, group: RankGroup, axis: int) -> torch.Tensor:
    """Return this rank's part of the sum over the ranks; gradients are gathered."""
    scattered: torch.Tensor = _ReduceScatterAlong.apply(x, group, axis)
    return scattered


def all_to_all(x: torch.Tensor, group: RankGroup, cut: int, joined: int) -> torch.Tensor:
    """Cut a tensor along one axis for the ranks, and join what they have along another.

    Args:
        x: cut along `joined`.
        group: the ranks.
        cut: the axis along which each rank gets a part.
        joined: the axis of which each rank gets all.
    """
    exchanged: torch.Tensor = _AllToAll.apply(x, group, cut, joined)
    return exchanged


def gather_rows(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Return all ranks' rows, in their order; each has the sum of its rows' gradients, times ranks.

    That is the gradient of what is the same on all ranks, where gradients are averaged later on.
    """
    gathered: torch.Tensor = _GatherRows.apply(x, group)
    return gathered


def max_over_group(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Return each element's largest value over the ranks; it has no gradient."""
    return _all_reduce(x, group, "max")


def sum_over_group(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Return the sum over the ranks; it has no gradient."""
    return _all_reduce(x, group)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: RankGroup) -> torch.Tensor:
        ctx.group = group
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(
            x.contiguous(), group.size, group.name
        )
        return _waited(gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        group = ctx.group
        scattered = torch.ops._c10d_functional.reduce_scatter_tensor(
            gradients[0].contiguous(), "sum", group.size, group.name
        )
        return _waited(scattered) * group.size, None


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: RankGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_reduce(gradients[0], ctx.group), None


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: RankGroup) -> torch.Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _GatherFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, rank: torch.Tensor, group: RankGroup, axis: int
    ) -> torch.Tensor:
        ctx.group, ctx.axis = group, axis
        ctx.save_for_backward(rank)
        return _all_gather(x, group, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (rank,) = ctx.saved_tensors
        return part_of_rank(gradients[0], rank, ctx.group, ctx.axis), None, None, None


class _ScatterAlong(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, rank: torch.Tensor, group: RankGroup, axis: int
    ) -> torch.Tensor:
        ctx.group, ctx.axis = group, axis
        return part_of_rank(x, rank, group, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _all_gather(gradients[0], ctx.group, ctx.axis), None, None, None


class _AllGatherAlong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: RankGroup, axis: int) -> torch.Tensor:
        ctx.group, ctx.axis = group, axis
        return _all_gather(x, group, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _reduce_scatter(gradients[0], ctx.group, ctx.axis), None, None


class _ReduceScatterAlong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: RankGroup, axis: int) -> torch.Tensor:
        ctx.group, ctx.axis = group, axis
        return _reduce_scatter(x, group, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _all_gather(gradients[0], ctx.group, ctx.axis), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: RankGroup, cut: int, joined: int) -> torch.Tensor:
        ctx.arguments = group, joined, cut
        return _exchange(x, group, cut, joined)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange(gradients[0], *ctx.arguments), None, None, None


def _all_reduce(x: torch.Tensor, group: RankGroup, how: str = "sum") -> torch.Tensor:
    return _waited(torch.ops._c10d_functional.all_reduce(x.contiguous(), how, group.name))


def _all_gather(x: torch.Tensor, group: RankGroup, axis: int) -> torch.Tensor:
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(
        x.movedim(axis, 0).contiguous(), group.size, group.name
    )
    # Not a view: a model that changes a view in place takes away hooks on what is behind it.
    return _waited(gathered).movedim(0, axis).contiguous()


def _reduce_scatter(x: torch.Tensor, group: RankGroup, axis: int) -> torch.Tensor:
    scattered = torch.ops._c10d_functional.reduce_scatter_tensor(
        x.movedim(axis, 0).contiguous(), "sum", group.size, group.name
    )
    return _waited(scattered).movedim(0, axis).contiguous()


def _exchange(x: torch.Tensor, group: RankGroup, cut: int, joined: int) -> torch.Tensor:
    parts = x.unflatten(cut, (group.size, -1)).movedim(cut, 0).contiguous()
    ones = [1] * group.size
    exchanged = torch.ops._c10d_functional.all_to_all_single(parts, ones, ones, group.name)
    return _waited(exchanged).movedim(0, joined).flatten(joined, joined + 1)


def _waited(pending: Any) -> torch.Tensor:
    waited: torch.Tensor = torch.ops._c10d_functional.wait_tensor(pending)
    return waited
