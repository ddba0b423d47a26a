"""Padding of variable-length batches to a few lengths, each of which compiles once.

The terms are those of TorchAcc's asynchronous loader: buckets, the longest length and their
number, and padding values by name.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Pads the last dimension of the named tensors of a batch to the next of `sizes`.

    A batch is a mapping, or a tuple or list whose elements are named "0", "1" and so on. As the
    `collate_fn` of a DataLoader, `collate` makes such a batch of samples.
    """

    sizes: tuple[int, ...]
    pad_values: Mapping[str, float]
    """Name -> padding value of the tensors that have a length: 0, or an ignored label."""

    def __post_init__(self) -> None:
        sizes = tuple(sorted(self.sizes))
        if not sizes or sizes[0] < 1 or len(set(sizes)) != len(sizes):
            raise ValueError(f"bucket sizes must be different and at least 1, not {self.sizes}")
        object.__setattr__(self, "sizes", sizes)

    @classmethod
    def even(cls, max_length: int, num_buckets: int, pad_values: Mapping[str, float]) -> "Buckets":
        """Return buckets at equal distances up to `max_length`.

        Raises:
            ValueError: there are more buckets than lengths, or none.
        """
        if not 1 <= num_buckets <= max_length:
            raise ValueError(f"{num_buckets} buckets for lengths up to {max_length}")
        sizes = (-(-max_length * number // num_buckets) for number in range(1, num_buckets + 1))
        return cls(tuple(sizes), pad_values)

    def size_for(self, length: int) -> int:
        """Return the smallest bucket that is long enough.

        Raises:
            ValueError: no bucket is.
        """
        for size in self.sizes:
            if length <= size:
                return size
        raise ValueError(f"a length of {length} is more than the largest bucket, {self.sizes[-1]}")

    def __call__(self, batch: Any) -> Any:
        """Pad the named tensors of a batch to the length of one bucket.

        Raises:
            ValueError: a named tensor is missing, or is too long.
        """
        parts = self._parts(batch)
        size = self.size_for(max(parts[name].shape[-1] for name in self.pad_values))
        padded = {
            **parts,
            **{name: self._pad(parts[name], name, size) for name in self.pad_values},
        }
        if isinstance(batch, Mapping):
            return padded
        return type(batch)(padded.values())

    def collate(self, samples: Sequence[Any]) -> Any:
        """Build a batch from samples: named tensors are padded, and all are stacked.

        Raises:
            ValueError: a named tensor is missing, or is too long.
        """
        parts = [self._parts(sample) for sample in samples]
        size = self.size_for(
            max(part[name].shape[-1] for part in parts for name in self.pad_values)
        )
        stacked: dict[str, torch.Tensor] = {}
        for name in parts[0]:
            tensors = [torch.as_tensor(part[name]) for part in parts]
            if name in self.pad_values:
                tensors = [self._pad(tensor, name, size) for tensor in tensors]
            stacked[name] = torch.stack(tensors)
        return stacked if isinstance(samples[0], Mapping) else tuple(stacked.values())

    def _parts(self, batch: Any) -> dict[str, Any]:
        parts = (
            dict(batch)
            if isinstance(batch, Mapping)
            else {str(index): part for index, part in enumerate(batch)}
        )
        missing = [name for name in self.pad_values if name not in parts]
        if missing:
            raise ValueError(f"no {missing[0]!r} in the batch, which has {', '.join(parts)}")
        return parts

    def _pad(self, tensor: torch.Tensor, name: str, size: int) -> torch.Tensor:
        return functional.pad(tensor, (0, size - tensor.shape[-1]), value=self.pad_values[name])
