"""Collectives of a forward pass with their gradients, which engines compile with the model.

They are torch's functional collectives, which all compilers here know, and are waited for at once.
The first three are those of Megatron-LM's tensor parallelism (Shoeybi et al., 2019), `all_to_all`
that of DeepSpeed-Ulysses (Jacobs et al., 2023), the others those of PartialFC (An et al., 2021).
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


def copy_to_group(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Return what is the same on all ranks; gradients are summed."""
    copied: torch.Tensor = _CopyToGroup.apply(x, group)
    return copied


def reduce_from_group(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Return the sum over the ranks; each has its gradient."""
    reduced: torch.Tensor = _ReduceFromGroup.apply(x, group)
    return reduced


def gather_from_group(x: torch.Tensor, rank: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Return all ranks' parts of the last axis; each has the gradient of its part.

    Args:
        x: this rank's part.
        rank: this rank in the group, int64 (); a tensor, so that all ranks compile one graph.
        group: the ranks.
    """
    gathered: torch.Tensor = _GatherFromGroup.apply(x, rank, group)
    return gathered


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
    def forward(ctx: Any, x: torch.Tensor, rank: torch.Tensor, group: RankGroup) -> torch.Tensor:
        ctx.group = group
        ctx.save_for_backward(rank)
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(
            x.movedim(-1, 0).contiguous(), group.size, group.name
        )
        return _waited(gathered).movedim(0, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (rank,) = ctx.saved_tensors
        parts = gradients[0].unflatten(-1, (ctx.group.size, -1))
        return parts.index_select(-2, rank[None]).squeeze(-2), None, None


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


def _exchange(x: torch.Tensor, group: RankGroup, cut: int, joined: int) -> torch.Tensor:
    parts = x.unflatten(cut, (group.size, -1)).movedim(cut, 0).contiguous()
    ones = [1] * group.size
    exchanged = torch.ops._c10d_functional.all_to_all_single(parts, ones, ones, group.name)
    return _waited(exchanged).movedim(0, joined).flatten(joined, joined + 1)


def _waited(pending: Any) -> torch.Tensor:
    waited: torch.Tensor = torch.ops._c10d_functional.wait_tensor(pending)
    return waited
