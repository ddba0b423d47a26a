"""Data parallel in the jitted step: gradients are averaged over the mesh of all devices."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax.numpy as jnp

from accbench.distributed.process_group import Topology
from accbench.distributed.strategies import Strategy
from accbench.engines.jax.data_mesh import DataMesh


class MeshDataParallel(Strategy):
    """Data parallel in the jitted step, over the mesh of all ranks' devices.

    Args:
        topology: the ranks.
        mesh: their devices.
        shards: whether large arrays are reduced in parts (`--dp_shard`).
        quietly: entered around the first collective, whose libraries print greetings.
    """

    collectives = "in_graph"

    def __init__(
        self,
        topology: Topology,
        mesh: DataMesh,
        shards: bool,
        quietly: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        super().__init__(topology)
        self.mesh, self._shards, self._quietly = mesh, shards, quietly

    @property
    def data_topology(self) -> Topology:
        tp = self.mesh.tp
        return dataclasses.replace(
            self.topology, rank=self.topology.rank // tp,
            world_size=self.topology.world_size // tp,
        )  # fmt: skip

    def average_probe(self, value: float) -> list[float]:
        # Long enough to be reduced in parts, where large gradients are.
        length = 1024 * self.mesh.num_token_ranks if self._shards else 2
        gradient = jnp.full((length,), value, jnp.float32)
        mesh, axis = self.mesh, self.mesh.shard_axis(gradient.shape)

        def average(
            state: Any, local_state: Any, inputs: Any, local_inputs: Any
        ) -> tuple[Any, Any, Any]:
            (shard,) = mesh.reduce_mean(local_inputs, [axis])
            return [mesh.all_gather(shard, axis)], local_state, inputs

        with self._quietly():
            averaged, _, _ = mesh.jit(average)(
                *(mesh.global_arrays([]), mesh.per_rank_arrays([])),
                *(mesh.global_arrays([]), mesh.per_rank_arrays([gradient])),
            )
            values: list[float] = mesh.local_data(averaged[0]).tolist()
        return values
