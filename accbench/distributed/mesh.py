"""The mesh: how the ranks of a run are laid out along the ways to share a training step.

The axes are torchtitan's, in its order, the outermost first: pipeline stages (pp), replicas
(replicate), shards of parameters and optimizer state (shard), parts of the sequence (cp), parts of
each product (tp). Neighbouring ranks lie along the innermost axis, which talks most.
"""

import dataclasses
import math

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accbench.config import TaskConfig, amp_level
from accbench.distributed.process_group import Topology
from accbench.errors import RequestError


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

    @property
    def num_workers_per_batch(self) -> int:
        """Ranks that share a batch."""
        return self.world_size // self.num_data_ranks

    @property
    def num_token_ranks(self) -> int:
        """Ranks that have tokens of their own; the others have the same ones."""
        return self.num_data_ranks * self.cp

    @property
    def of_gradients(self) -> "MeshShape":
        """The mesh as it averages gradients: parts of a sequence are as other data."""
        if self.shard > 1:
            return dataclasses.replace(self, shard=self.shard * self.cp, cp=1)
        return dataclasses.replace(self, replicate=self.replicate * self.cp, cp=1)

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

    def data_groups(self) -> list[list[int]]:
        """Return the ranks that average gradients with each other, group by group."""
        return self._groups_along("replicate", "shard")

    def pp_groups(self) -> list[list[int]]:
        """Return the ranks that have the stages of one model, in order, group by group."""
        return self._groups_along("pp")

    def _groups_along(self, *axes: str) -> list[list[int]]:
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            at = self.coordinates(rank)
            key = (*(index for axis, index in at.items() if axis not in axes),)
            groups.setdefault(key, []).append(rank)
        return [*groups.values()]

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
    if task.dp_shard is None and task.zero is not None:
        raise RequestError(f"--zero {task.zero} shards nothing without --dp_shard auto")
    if task.pp == 1 and task.pp_schedule is not None:
        raise RequestError(f"--pp_schedule {task.pp_schedule} orders nothing without --pp 2")
    if task.cp == 1 and task.cp_attention != "ulysses":
        raise RequestError(f"--cp_attention {task.cp_attention} shares nothing without --cp 2")
    if task.sequence_parallel and task.tp == 1:
        raise RequestError(
            "--sequence_parallel cuts what lies between the layers that --tp cuts; add --tp 2, or "
            "leave it out"
        )
    num_data_ranks, after, taken = world_size, "", ""
    for flag, size in (("tp", task.tp), ("cp", task.cp), ("pp", task.pp)):
        _refuse_remainder(num_data_ranks, flag, size, "use one of", after)
        if size > 1:
            num_data_ranks //= size
            taken = f"{taken} and --{flag} {size}".removeprefix(" and ")
            after = f" after {taken}"
    sizes = {"pp": task.pp, "cp": task.cp, "tp": task.tp}
    if task.dp_shard is None:
        return MeshShape(replicate=num_data_ranks, **sizes)
    num_shards = num_data_ranks if task.dp_shard == "auto" else _as_size(task.dp_shard)
    _refuse_remainder(num_data_ranks, "dp_shard", num_shards, "use auto or one of", after)
    if task.dp_shard == "auto" and num_shards == 1 and taken and _needs_shards(task):
        raise RequestError(
            f"--dp_shard auto shards nothing: 1 of {world_size} workers is left{after}; leave "
            "--dp_shard out, or start more workers"
        )
    return MeshShape(replicate=num_data_ranks // num_shards, shard=num_shards, **sizes)


def _needs_shards(task: TaskConfig) -> bool:
    """Return whether `--dp_shard auto` over one worker is a mistake."""
    # --offload all copies shards, one as well; and the workers of an elastic run may become more.
    return task.offload != "all" and num_workers(task) is not None


def is_sharded(task: TaskConfig) -> bool:
    """Return whether a task's flags ask for more than replicas on devices."""
    return task.dp_shard is not None or max(task.tp, task.cp, task.pp) > 1 or task.offload != "none"


def workers_per_batch(task: TaskConfig) -> int:
    """Return how many workers a task has share each batch."""
    return task.tp * task.cp * task.pp


def script_problem(task: TaskConfig) -> str | None:
    """Return why a script cannot train sharded as asked, or None if it can."""
    if max(task.tp, task.cp, task.pp) > 1 or task.offload != "none":
        return (
            "--tp, --cp, --pp and --offload are for accbench's own loop, not for those of scripts; "
            "use --dp_shard auto, or train with --model"
        )
    if task.zero == 1:
        return (
            "--zero 1: a script's optimizer steps with the parameters that its model has, which "
            "are whole there; use --zero 2 or 3"
        )
    return None


def offload_problem(task: TaskConfig) -> str | None:
    """Return why `--offload` cannot be had with a task's other flags, or None if it can."""
    if task.offload != "none" and task.pp > 1:
        return (
            f"--offload {task.offload}: --pp {task.pp} keeps each stage's state on its device; "
            "leave --offload out, or use --dp_shard auto in place of --pp"
        )
    if task.offload == "all" and task.dp_shard is None:
        return (
            "--offload all copies the shards of --dp_shard to the device as they are needed; add "
            "--dp_shard auto, or use --offload optimizer"
        )
    if task.offload == "all" and zero_stage(task) != 3:
        return (
            f"--offload all: --zero {task.zero} keeps whole parameters on the device; use --zero "
            "3, or --offload optimizer"
        )
    return None


def pipeline_problem(task: TaskConfig, shape: MeshShape) -> str | None:
    """Return why `--pp` cannot be had with a task's other flags, or None if it can."""
    if shape.pp == 1:
        return None
    if shape.shard > 1 and zero_stage(task) != 1:
        return (
            f"--pp with --zero {zero_stage(task)}: micro-batches would gather each block again and "
            "again; use --zero 1"
        )
    if amp_level(task) == "O1" and task.amp_dtype == "float16":
        return "--pp with --amp_dtype float16: use bfloat16"
    schedule, num_parts = task.pp_schedule or "1f1b", task.accumulate
    if num_parts < shape.pp:
        return (
            f"--accumulate {num_parts}: --pp {shape.pp} works on as many micro-batches at once; "
            f"use --accumulate {shape.pp} or more"
        )
    if schedule == "interleaved" and num_parts % shape.pp:
        return (
            f"--accumulate {num_parts}: --pp_schedule interleaved takes micro-batches {shape.pp} "
            f"at a time; use a multiple of {shape.pp}"
        )
    return None


def sequence_problem(task: TaskConfig, length: int | None) -> str | None:
    """Return why `--sequence_parallel` cannot cut sequences evenly, or None if it can.

    Args:
        task: the task.
        length: of a sequence that the model computes with; None if it is not known yet.
    """
    step = task.cp * task.tp
    if not task.sequence_parallel or length is None or length % step == 0:
        return None
    cut = f"--tp {task.tp}" if task.cp == 1 else f"--cp {task.cp} times --tp {task.tp}"
    leave_out = "leave --sequence_parallel out"
    if length != task.seq_len:
        return f"--sequence_parallel: sequences of {length} are no multiple of {cut}; {leave_out}"
    return (
        f"--sequence_parallel: --seq_len {length} is no multiple of {cut}; use --seq_len "
        f"{max(step, length // step * step)}, or {leave_out}"
    )


def num_stages(task: TaskConfig) -> int:
    """Return the stages that `--pp` cuts a model into: interleaved, each worker has two."""
    return task.pp * (2 if task.pp_schedule == "interleaved" else 1)


def _refuse_remainder(num: int, flag: str, size: int, remedy: str, after: str = "") -> None:
    if num % size:
        workers = "1 worker" if num == 1 else f"{num} workers"
        verb = "is" if num == 1 else "are"
        fitting = ", ".join(str(n) for n in range(1, num + 1) if num % n == 0)
        raise RequestError(
            f"{workers}{after} {verb} no multiple of --{flag} {size}; {remedy} {fitting}"
        )


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
