"""Shards of parameters: what a rank keeps of each parameter where they are sharded.

A parameter of n rows, along its first axis, is cut as `torch.chunk` cuts it, and so as torch's
FSDP does: ranks have ceil(n / num_ranks) rows, the last ones fewer or none. An optimizer steps
with a plain tensor of a rank's rows, so that all that works on plain tensors, fused updates too,
works on shards. Values of a parameter's shape, such as its moments, are cut alike. With tensor
parallelism the rows are those of the part that a `TensorSlice` leaves.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from accbench.distributed.tensor_slices import TensorSlice

_T = TypeVar("_T")
# Tensors are gathered and reduced together up to this size.
_BUCKET_BYTES = 2**24


@dataclasses.dataclass(frozen=True)
class ShardGroups:
    """The ranks that together have one whole model."""

    rows: dist.ProcessGroup
    """Those that have rows of the same tensors, in order."""
    tp: dist.ProcessGroup | None = None
    """Those that have slices of the same tensors, in order; None without tensor parallelism."""
    is_first_replica: bool = True
    """Whether rank 0 is among the ranks that have this model."""


@dataclasses.dataclass(frozen=True)
class ParameterShard:
    """One parameter, and the rows of it that this rank keeps."""

    parameter: nn.Parameter
    """The parameter in the form that the model has."""
    local: nn.Parameter
    """The rows of this rank, which the optimizer steps with: in the parameter's own memory, or a
    copy in host memory."""
    rows: slice
    groups: ShardGroups
    tensor_slice: TensorSlice | None = None
    """The part of which it has rows; None for the whole parameter."""
    resident: torch.Tensor | None = None
    """The rows in the parameter's own memory, where `local` is a copy of them."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return self.part_shape if self.tensor_slice is None else self.tensor_slice.shape

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of what it has rows of."""
        return tuple(self.parameter.shape)

    def cut(self, whole: Any) -> torch.Tensor:
        """Return this rank's rows of a whole tensor, or of a file's, of the same shape."""
        part = whole if self.tensor_slice is None else self.tensor_slice.cut(whole)
        rows: torch.Tensor = part[self.rows]
        return rows

    def all_gather(self, local: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor of all ranks' rows, on their device; all ranks call it."""
        part = all_gather_rows(local, self.part_shape, self.groups.rows)
        if self.tensor_slice is None or self.groups.tp is None:
            return part
        num_ranks = self.groups.tp.size()
        parts = part.new_empty((num_ranks, *part.shape))
        dist.all_gather_into_tensor(_as_bytes(parts), _as_bytes(part), group=self.groups.tp)
        return self.tensor_slice.join([*parts])

    def gather(self, local: torch.Tensor) -> torch.Tensor | None:
        """Return the whole tensor on rank 0, and None elsewhere; all ranks call it."""
        tp = self.groups.tp
        is_double = self.tensor_slice is None and tp is not None and tp.rank() != 0
        if is_double or not self.groups.is_first_replica:
            return None
        part = gather_rows(local, self.part_shape, self.groups.rows)
        if part is None or self.tensor_slice is None or tp is None:
            return part
        parts = [torch.empty_like(part) for _ in range(tp.size())] if tp.rank() == 0 else None
        received = None if parts is None else [_as_bytes(other) for other in parts]
        dist.gather(_as_bytes(part), received, group=tp, group_dst=0)
        return None if parts is None else self.tensor_slice.join(parts)

    @property
    def in_parameter(self) -> torch.Tensor:
        """The rows in the parameter's own memory."""
        return self.local if self.resident is None else self.resident

    @torch.no_grad()
    def read_parameter(self) -> None:
        """Give what the optimizer steps with the parameter's values, where it is a copy."""
        if self.resident is not None:
            self.local.copy_(self.resident)

    @torch.no_grad()
    def write_parameter(self) -> None:
        """Copy what the optimizer has stepped into the parameter, unless it is there; no wait."""
        if self.resident is not None:
            self.resident.copy_(self.local, non_blocking=True)

    def is_like(self, value: torch.Tensor) -> bool:
        """Return whether a value of the optimizer's has the rows' shape, and is cut alike."""
        return value.dim() > 0 and value.shape == self.local.shape


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor of this shape in host memory, from which CUDA copies while it runs."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


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


class ShardedTensor:
    """A tensor of which each rank has a shard, and which is gathered when it is needed.

    Args:
        local: this rank's rows.
        shard: of the parameter that it is cut like.
    """

    def __init__(self, local: torch.Tensor, shard: ParameterShard) -> None:
        self.shape, self.dtype = shard.shape, local.dtype
        self._local, self._shard = local, shard
        self.is_gathered = False

    def gather(self) -> torch.Tensor | None:
        """Return the whole tensor on rank 0, None elsewhere; all ranks call it, in one order."""
        self.is_gathered = True
        return self._shard.gather(self._local)


class StagedTensor(ShardedTensor):
    """A tensor that one pipeline stage has, whole or in shards.

    Args:
        part: what this rank has of it; None where another stage has it.
        shape: the whole tensor's.
        dtype: the tensor's.
        owner: the rank in the group whose stage has it.
        group: the ranks that have the stages of one model, in order.
        device: where it travels.
    """

    def __init__(
        self, part: "torch.Tensor | ShardedTensor | None", shape: tuple[int, ...],
        dtype: torch.dtype, owner: int, group: dist.ProcessGroup, device: torch.device,
    ) -> None:  # fmt: skip
        self.shape, self.dtype, self._part = shape, dtype, part
        self._owner, self._group, self._device = owner, group, device
        self.is_gathered = False

    def gather(self) -> torch.Tensor | None:
        """Return the whole tensor on rank 0, None elsewhere; all ranks call it, in one order."""
        self.is_gathered = True
        part, is_first = self._part, dist.get_global_rank(self._group, 0) == 0
        whole = part.gather() if isinstance(part, ShardedTensor) else part
        own = self._group.rank()
        if not is_first or own not in (0, self._owner):
            return None
        if self._owner != 0 and own == self._owner:
            assert whole is not None
            sent = _as_bytes(whole.detach().to(self._device))
            dist.send(sent, group=self._group, group_dst=0)
            return None
        if self._owner != 0:
            whole = torch.empty(self.shape, dtype=self.dtype, device=self._device)
            dist.recv(whole.view(-1).view(torch.uint8), group=self._group, group_src=self._owner)
        return whole

    def share(self) -> torch.Tensor:
        """Return the whole tensor on all ranks, on the host; all ranks call it, in one order.

        Its part must not be in shards.
        """
        shared = torch.empty(self.shape, dtype=self.dtype, device=self._device)
        if isinstance(self._part, torch.Tensor):
            shared.copy_(self._part)
        bytes_of_shared = shared.view(-1).view(torch.uint8)
        dist.broadcast(bytes_of_shared, group=self._group, group_src=self._owner)
        return shared.cpu()


def fill_from_rows(shards: Iterable[ParameterShard], group: dist.ProcessGroup) -> None:
    """Give whole parameters the rows that each rank has stepped; all ranks call it."""
    sized = ((s, math.prod(s.part_shape) * s.local.element_size(), s.local.dtype) for s in shards)
    for bucket in buckets(sized):
        wholes = all_gather_several(
            [shard.in_parameter for shard in bucket], [s.part_shape for s in bucket], group
        )
        for shard, whole in zip(bucket, wholes, strict=True):
            shard.parameter.detach().copy_(whole)


def sum_in_buckets(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum tensors over a group's ranks, in place, several in one collective; all call it."""
    for bucket in buckets((tensor, tensor.nbytes, tensor.dtype) for tensor in tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(flat, group=group)
        for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


def buckets(sized: Iterable[tuple[_T, int, torch.dtype]]) -> Iterator[list[_T]]:
    """Yield neighbours of one dtype together, up to `_BUCKET_BYTES` or one of them.

    Args:
        sized: each with its bytes and its dtype.
    """
    bucket: list[_T] = []
    num_bytes, dtype_before = 0, None
    for item, size, dtype in sized:
        if bucket and (dtype != dtype_before or num_bytes + size > _BUCKET_BYTES):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(item)
        num_bytes, dtype_before = num_bytes + size, dtype
    if bucket:
        yield bucket


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's bytes: gloo does not support all types."""
    return tensor.contiguous().view(-1).view(torch.uint8)
