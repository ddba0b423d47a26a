"""The mesh: how the ranks of a run are laid out along the ways to share a training step.

The axes are torchtitan's, in its order, the outermost first: pipeline stages (pp), replicas
(replicate), shards of parameters and optimizer state (shard), parts of the sequence (cp), parts of
each product (tp). Neighbouring ranks lie along the innermost axis, which talks most.
"""

import dataclasses
import math

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accbench.config import TaskConfig
from accbench.distributed.process_group import Topology
from accbench.errors import RequestError

NOT_FOR_SCRIPTS = (
    "--dp_shard shards models of accbench's own loop, not those of scripts; leave it out, or train "
    "with --model"
)


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """The number of ranks along each axis; the fields are in the axes' order."""

    pp: int = 1
    replicate: int = 1
    shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks along each axis, by its name."""
        return dataclasses.asdict(self)

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return math.prod(self.sizes.values())

    @property
    def num_data_ranks(self) -> int:
        """Ranks that have a batch of their own; the others share one."""
        return self.replicate * self.shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's position along each axis."""
        found = {}
        for name, size in reversed(self.sizes.items()):
            rank, found[name] = divmod(rank, size)
        return found

    def data_topology(self, topology: Topology) -> Topology:
        """Return the topology that loaders see: ranks with the same data have the same number."""
        at = self.coordinates(topology.rank)
        data_rank = at["replicate"] * self.shard + at["shard"]
        return dataclasses.replace(topology, rank=data_rank, world_size=self.num_data_ranks)

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """Build torch's mesh of the axes with several ranks, and of `shard`; all ranks call it.

        Args:
            device_type: cpu or cuda.
        """
        sizes = {name: size for name, size in self.sizes.items() if size > 1 or name == "shard"}
        return init_device_mesh(device_type, (*sizes.values(),), mesh_dim_names=(*sizes,))


def of_task(task: TaskConfig, world_size: int) -> MeshShape:
    """Return the mesh that a task's flags ask for.

    Args:
        task: the task.
        world_size: workers in all.

    Raises:
        RequestError: they do not fit this number of workers; the message names those that do.
    """
    if task.dp_shard is None:
        if task.zero is not None:
            raise RequestError(f"--zero {task.zero} shards nothing without --dp_shard auto")
        return MeshShape(replicate=world_size)
    num_shards = world_size if task.dp_shard == "auto" else _as_size(task.dp_shard)
    if world_size % num_shards:
        workers = "1 worker is" if world_size == 1 else f"{world_size} workers are"
        fitting = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise RequestError(
            f"{workers} no multiple of --dp_shard {num_shards}; use auto or one of {fitting}"
        )
    return MeshShape(replicate=world_size // num_shards, shard=num_shards)


def num_workers(task: TaskConfig) -> int | None:
    """Return the number of workers that a task starts; None where it may change."""
    return task.nproc_per_node * int(task.nnodes) if task.nnodes.isdigit() else None


def zero_stage(task: TaskConfig) -> int:
    """Return the stage of ZeRO that a sharded task trains with."""
    return task.zero or 3


def _as_size(text: str) -> int:
    if text.isdigit() and int(text):
        return int(text)
    raise RequestError(f"--dp_shard must be auto or a number of workers, not {text!r}")
