"""Rows of parameters: what a rank keeps of each parameter where they are sharded.

A parameter of n rows, along its first axis, is cut as `torch.chunk` cuts it, and so as torch's
FSDP does: ranks have ceil(n / num_ranks) rows, the last ones fewer or none. An optimizer steps
with a plain tensor of a rank's rows, so that all that works on plain tensors, fused updates too,
works on shards. Values of a parameter's shape, such as its moments, are cut alike.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# Rows are gathered together up to this size.
_BUCKET_BYTES = 2**24


@dataclasses.dataclass(frozen=True)
class ParameterShard:
    """One parameter, and the rows of it that this rank keeps."""

    parameter: nn.Parameter
    """The parameter in the form that the model has."""
    local: nn.Parameter
    """The rows of this rank, in the parameter's own memory; what the optimizer steps with."""
    shape: tuple[int, ...]
    """The shape of the whole parameter."""
    rows: slice

    def cut(self, whole: Any) -> torch.Tensor:
        """Return this rank's rows of a whole tensor, or of a file's slice, of the same shape."""
        rows: torch.Tensor = whole[self.rows]
        return rows

    def is_like(self, value: torch.Tensor) -> bool:
        """Return whether a value of the optimizer's has the rows' shape, and is cut alike."""
        return value.dim() > 0 and value.shape == self.local.shape


def rows_of_rank(num_rows: int, rank: int, num_ranks: int) -> slice:
    """Return the rows that a rank keeps, as `torch.chunk` cuts them."""
    most = math.ceil(num_rows / num_ranks)
    return slice(min(rank * most, num_rows), min((rank + 1) * most, num_rows))


def all_gather_rows(
    local: torch.Tensor, shape: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Return the whole tensor of all ranks' rows, on their device; all ranks of the group call it.

    Args:
        local: this rank's rows.
        shape: of the whole tensor.
        group: the ranks that have its rows, in order.
    """
    (whole,) = all_gather_several([local], [shape], group)
    return whole


def all_gather_several(
    locals_: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Return whole tensors of one dtype, gathered in one collective; see `all_gather_rows`."""
    num_ranks = group.size()
    most = [math.ceil(shape[0] / num_ranks) * math.prod(shape[1:]) for shape in shapes]
    padded = locals_[0].new_zeros(sum(most))
    for part, local in zip(padded.split(most), locals_, strict=True):
        part[: local.numel()].copy_(local.detach().reshape(-1))
    gathered = padded.new_empty(num_ranks * padded.numel())
    # As bytes: gloo does not support all types.
    dist.all_gather_into_tensor(gathered.view(torch.uint8), padded.view(torch.uint8), group=group)
    by_rank = [row.split(most) for row in gathered.view(num_ranks, -1)]
    return [
        torch.cat([parts[index] for parts in by_rank])[: math.prod(shape)].view(*shape)
        for index, shape in enumerate(shapes)
    ]


def gather_rows(
    local: torch.Tensor, shape: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor | None:
    """Return the whole tensor on the group's first rank, and None on the others; all call it."""
    most = math.ceil(shape[0] / group.size()) * math.prod(shape[1:])
    padded = local.new_zeros(most)
    padded[: local.numel()].copy_(local.detach().reshape(-1))
    parts = None
    if group.rank() == 0:
        parts = [torch.empty_like(padded).view(torch.uint8) for _ in range(group.size())]
    dist.gather(padded.view(torch.uint8), parts, group=group, group_dst=0)
    if parts is None:
        return None
    joined = torch.cat([part.view(padded.dtype) for part in parts])
    return joined[: math.prod(shape)].view(*shape)


class RowsTensor:
    """A tensor of which each rank has rows, and which is gathered when it is needed.

    Args:
        local: this rank's rows.
        shape: of the whole tensor.
        group: the ranks that have its rows, in order.
    """

    def __init__(self, local: torch.Tensor, shape: Sequence[int], group: dist.ProcessGroup) -> None:
        self.shape, self.dtype = tuple(shape), local.dtype
        self._local, self._group = local, group
        self.is_gathered = False

    def gather(self) -> torch.Tensor | None:
        """Return the whole tensor on rank 0, None elsewhere; all ranks call it, in one order."""
        self.is_gathered = True
        if dist.get_process_group_ranks(self._group)[0] != 0:
            return None  # another replica's
        return gather_rows(self._local, self.shape, self._group)


def fill_from_rows(shards: Iterable[ParameterShard], group: dist.ProcessGroup) -> None:
    """Give whole parameters the rows that each rank has stepped; all ranks call it."""
    for bucket in _buckets(shards):
        wholes = all_gather_several(
            [shard.local for shard in bucket], [shard.shape for shard in bucket], group
        )
        for shard, whole in zip(bucket, wholes, strict=True):
            shard.parameter.detach().copy_(whole)


def _buckets(shards: Iterable[ParameterShard]) -> list[list[ParameterShard]]:
    """Group neighbours of one dtype, up to `_BUCKET_BYTES` of whole parameters or one of them."""
    found: list[list[ParameterShard]] = []
    num_bytes = 0
    for shard in shards:
        size = math.prod(shard.shape) * shard.local.element_size()
        fits = found and num_bytes + size <= _BUCKET_BYTES
        if not fits or found[-1][0].local.dtype != shard.local.dtype:
            found.append([])
            num_bytes = 0
        found[-1].append(shard)
        num_bytes += size
    return found
