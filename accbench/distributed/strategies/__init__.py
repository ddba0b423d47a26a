"""The strategy contract: how work and state are spread over the ranks.

An engine has one strategy, and knows nothing of how it averages. Data parallel is the first: each
rank has the whole model and a part of the batch. Its forms are `data_parallel` (PyTorch's
DistributedDataParallel), engine xla's `reduction` and engine jax's device mesh.
"""

import abc
from collections.abc import Sequence

from accbench.distributed.process_group import Topology, all_gather_values
from accbench.errors import ReductionError


class Strategy(abc.ABC):
    """How the ranks of a run share a training step.

    Args:
        topology: the ranks.
    """

    collectives: str
    """Where gradients are reduced: in_graph, process_group or host."""
    shards_parameters: bool = False
    """Whether each rank has shards of the model's parameters (DTensor): a forward pass gathers
    them, and so waits for the other ranks."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    @abc.abstractmethod
    def average_probe(self, value: float) -> Sequence[float]:
        """Average a gradient of `value` over the ranks, in the way training does, and return it."""

    @property
    def data_topology(self) -> Topology:
        """This rank and the number of ranks, counting only those with a batch of their own."""
        return self.topology

    def prove(self) -> None:
        """Average known values, a different one on each rank, and check the result.

        Raises:
            ReductionError: on every rank, if the result is wrong on any.
        """
        data = self.data_topology
        if data.world_size == 1:
            return
        expected = (data.world_size + 1) / 2  # mean of 1..world_size
        averaged = self.average_probe(float(data.rank + 1))
        wrong = [value for value in averaged if abs(value - expected) > 1e-6]
        wrong_ranks = [rank for rank, (bad,) in enumerate(all_gather_values([len(wrong)])) if bad]
        if wrong_ranks:
            raise ReductionError(
                f"gradients are not averaged over the {data.world_size} ranks "
                f"({self.collectives}): rank {self.topology.rank} has {averaged[0]} where "
                f"{expected} is right; wrong on ranks {wrong_ranks}"
            )
