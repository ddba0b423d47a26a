"""Slices of tensors along any axis: what a rank keeps of a weight in tensor parallelism."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class TensorSlice:
    """The equal part of a tensor that one of several ranks keeps.

    `num_fused` tensors lie one after the other along the axis, each of which is cut: 3 where one
    weight holds those of query, key and value.
    """

    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    axis: int
    rank: int
    num_ranks: int
    num_fused: int = 1

    def cut(self, whole: Any) -> torch.Tensor:
        """Return this rank's part of a whole tensor, or of a file's, of the same shape."""
        stride = self.shape[self.axis] // self.num_fused
        length = stride // self.num_ranks
        parts = []
        for first in range(self.rank * length, self.shape[self.axis], stride):
            index = (*(slice(None),) * self.axis, slice(first, first + length))
            parts.append(whole[index])
        return torch.cat(parts, self.axis) if len(parts) > 1 else parts[0]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole tensor of all ranks' parts, in the ranks' order."""
        fused = zip(*(part.chunk(self.num_fused, self.axis) for part in parts), strict=True)
        return torch.cat([torch.cat(of_ranks, self.axis) for of_ranks in fused], self.axis)


@dataclasses.dataclass(frozen=True)
class PaddedRows(TensorSlice):
    """Rows of a tensor that are as many on each rank: those of the last ones end in zeros."""

    @property
    def num_rows(self) -> int:
        """Rows of each rank."""
        return math.ceil(self.shape[0] / self.num_ranks)

    def cut(self, whole: Any) -> torch.Tensor:
        first = min(self.rank * self.num_rows, self.shape[0])
        rows: torch.Tensor = whole[first : first + self.num_rows]
        missing = self.num_rows - len(rows)
        return torch.cat([rows, rows.new_zeros(missing, *self.shape[1:])]) if missing else rows

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([*parts])[: self.shape[0]]
