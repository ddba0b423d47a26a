"""The parameters that each rank measures, so that ranks with equal states measure none twice."""

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from functools import cached_property

import torch

from accbench.comparing import pieces
from accbench.engines.common.training_state import TrainingState


@dataclasses.dataclass(frozen=True)
class RankShare:
    """A rank's share of the parameters, and how ranks tell each other what they measured.

    Args:
        num_values: parameter -> how many numbers it has.
        rank: this rank.
        world_size: all ranks, each of which has the same `num_values`.
        gather: sends this rank's numbers to all, and returns those of every rank.
    """

    num_values: Mapping[str, int]
    rank: int
    world_size: int
    gather: Callable[[list[float]], list[list[float]]]

    @staticmethod
    def of_equal(
        state: TrainingState, num_values: Mapping[str, int], rank: int,
        gather: Callable[[list[float]], list[list[float]]],
    ) -> "RankShare | None":  # fmt: skip
        """Return this rank's share where all ranks have the same optimizer's state; else None.

        All ranks call this.
        """
        checksums = [value for (value,) in gather([float(crc32_of_optimizer(state))])]
        if len(set(checksums)) > 1:
            return None
        return RankShare(num_values, rank, len(checksums), gather)

    @cached_property
    def owners(self) -> dict[str, int]:
        """Parameter -> the rank that measures it; each rank has about as many numbers."""
        loads, owners = [0] * self.world_size, {}
        for name in sorted(self.num_values, key=lambda n: (-self.num_values[n], n)):
            owners[name] = loads.index(min(loads))
            loads[owners[name]] += self.num_values[name]
        return owners

    def has(self, name: str) -> bool:
        """Return whether this rank measures a parameter."""
        return self.owners[name] == self.rank

    def join(self, own: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        """Return every rank's results; all ranks call this.

        Args:
            own: parameter -> two numbers. A parameter of this rank's share that it lacks is lacking
                in the result, too.
        """
        names = sorted(self.num_values)
        numbers = [number for name in names for number in (name in own, *own.get(name, (0, 0)))]
        of_ranks = self.gather([float(number) for number in numbers])
        joined = {}
        for index, name in enumerate(names):
            is_there, *found = of_ranks[self.owners[name]][3 * index : 3 * index + 3]
            if is_there:
                joined[name] = (found[0], found[1])
        return joined


def crc32(tensor: torch.Tensor, start: int = 0) -> int:
    """Return a checksum of a tensor's bits, which goes on from another one's."""
    return zlib.crc32(pieces.flat(tensor).contiguous().view(torch.uint8).numpy().data, start)


def crc32_of_optimizer(state: TrainingState) -> int:
    """Return a checksum of all of an optimizer's tensors, with their names and shapes."""
    found = 0
    for name, tensors in sorted(state.optimizer.items()):
        for key, tensor in sorted(tensors.items()):
            head = f"{name} {key} {tensor.dtype} {tuple(tensor.shape)}"
            found = crc32(tensor, zlib.crc32(head.encode(), found))
    return found
