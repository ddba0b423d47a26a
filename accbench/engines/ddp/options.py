"""The options of engines that step with torch, and what `--ddp.data_parallel` needs."""

import dataclasses

import torch

from accbench import engines
from accbench.config import TaskConfig, devices_per_worker
from accbench.config.field import flag
from accbench.distributed import mesh


@dataclasses.dataclass(frozen=True)
class TorchOptions(engines.Engine.Options):
    """Options of the engines ddp and inductor."""

    channels_last: bool = flag(
        True,
        "Keep images and weights as NHWC in memory, the fastest layout for convolutions. A "
        "model that joins channels and pixels by `view` still gets NCHW. A script decides "
        "memory formats itself.",
    )
    find_unused_parameters: bool = flag(
        False,
        "With several workers: look in every step for parameters that the loss does not depend "
        "on. Models that have such parameters need it; others are slower with it.",
    )


@dataclasses.dataclass(frozen=True)
class DdpOptions(TorchOptions):
    """Options of the engine ddp."""

    data_parallel: int = flag(
        1,
        "CUDA devices over which one worker shares each batch, by torch.nn.DataParallel: to "
        "compare with what torch itself advises against. --batch_size is for all of them together.",
        minimum=1,
        of_scripts=False,
    )


def data_parallel_problem(task: TaskConfig) -> str | None:
    """Return why `--ddp.data_parallel` cannot be had as asked, or None if it can."""
    num_devices = devices_per_worker(task)
    if num_devices == 1:
        return None
    asked = f"--{task.engine}.data_parallel {num_devices}"
    if task.device != "cuda":
        return (
            f"{asked}: torch.nn.DataParallel shares nothing on a CPU; use --nproc_per_node "
            f"{num_devices} in its place"
        )
    if (task.launcher, task.nproc_per_node) != ("local", 1):
        return (
            f"{asked} is one worker for all devices of this machine; use --nproc_per_node 1, "
            "without --launcher and --nnodes"
        )
    if mesh.is_sharded(task) or task.accumulate > 1:
        return (
            f"{asked} copies the whole model to each device and takes a batch at once; leave out "
            "--dp_shard, --tp, --cp, --pp, --offload and --accumulate"
        )
    if (task.batch_size or 0) % num_devices:
        size = task.batch_size or 0
        return (
            f"{asked}: --batch_size {size} is no multiple of it; use "
            f"{max(num_devices, size // num_devices * num_devices)}"
        )
    num_here = torch.cuda.device_count()
    if num_devices > num_here:
        return f"{asked} is more than the {num_here} CUDA devices here"
    return None
