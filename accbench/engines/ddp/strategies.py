"""Choose the strategy by which engines ddp and inductor share a step over ranks."""

from typing import Any

import torch
import torch.distributed as dist

from accbench.config import TaskConfig, devices_per_worker
from accbench.distributed import mesh, process_group
from accbench.distributed.mesh import MeshShape
from accbench.distributed.process_group import Topology
from accbench.distributed.strategies.data_parallel import DataParallel
from accbench.distributed.strategies.one_process import OneProcess
from accbench.distributed.strategies.sharded_optimizer import ShardedOptimizer
from accbench.distributed.strategies.torch_strategy import TorchStrategy


def build(
    task: TaskConfig, shape: MeshShape, topology: Topology, device: torch.device,
    shards_classes: bool, find_unused_parameters: bool,
) -> TorchStrategy:  # fmt: skip
    """Build the strategy that a task asks for; all ranks call it.

    Args:
        task: the task.
        shape: how the ranks average gradients.
        topology: the ranks.
        device: this rank's.
        shards_classes: whether each rank keeps some of the model's classes (PartialFC).
        find_unused_parameters: see `DataParallel`.
    """
    if devices_per_worker(task) > 1:
        return OneProcess(topology, device, devices_per_worker(task))
    settings = (device, task.engine, find_unused_parameters)
    is_cut = max(shape.shard, shape.tp, shape.pp) > 1 or shards_classes
    if not is_cut and task.offload == "none":
        return DataParallel(topology, *settings)
    if not dist.is_initialized():
        process_group.init_alone(device.type)
    steps_on_host = task.offload == "optimizer"
    has_wholes = shape.shard == 1 or mesh.zero_stage(task) == 1
    if not has_wholes or task.offload == "all":
        # Imported here: its imports take time.
        from accbench.distributed.strategies.sharded_data_parallel import ShardedDataParallel

        return ShardedDataParallel(
            topology, device, shape, keeps_gathered=mesh.zero_stage(task) == 2,
            steps_on_host=steps_on_host, offloads_parameters=task.offload == "all",
        )  # fmt: skip
    # Gradients are averaged over those alone that have other tokens.
    group: Any = dist.new_subgroups_by_enumeration(shape.data_groups())[0]
    data_parallel = DataParallel(shape.data_topology(topology), *settings, group)
    if shape.pp > 1:
        from accbench.distributed.strategies.pipeline_parallel import PipelineParallel

        num_stages = mesh.num_stages(task)
        return PipelineParallel(topology, device, shape, data_parallel, num_stages)
    return ShardedOptimizer(topology, device, shape, steps_on_host, data_parallel)
