"""Data parallel by torch.nn.DataParallel: one process copies the model to each of its devices.

It does so in every step. Engine ddp has it to be compared with, as many still train by it.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from accbench.distributed.process_group import Topology
from accbench.distributed.strategies.torch_strategy import TorchStrategy


class ReplicatedModel(nn.DataParallel[nn.Module]):
    """A model of which each device runs a copy, for a part of the batch.

    Args:
        model: on the first of the devices.
        device_ids: the devices' numbers.
    """

    def parallel_apply(
        self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Call the replicas, each in a thread, as autocast is in this one."""
        # torch's threads only learn that autocast is on: bfloat16 would become float16 in them.
        kind = self.src_device_obj.type
        calls: Any = [
            partial(_call, kind, torch.get_autocast_dtype(kind), replica) for replica in replicas
        ]
        return super().parallel_apply(calls, inputs, kwargs)


def _call(
    device_type: str, autocast_dtype: torch.dtype, replica: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    torch.set_autocast_dtype(device_type, autocast_dtype)
    return replica(*args, **kwargs)


class OneProcess(TorchStrategy):
    """One process has all devices, and the first of them the parameters.

    Args:
        topology: the ranks, which are one.
        device: the first device.
        num_devices: how many of them there are.
    """

    collectives = "torch.nn.DataParallel"

    def __init__(self, topology: Topology, device: torch.device, num_devices: int) -> None:
        super().__init__(topology, device)
        self.num_devices = num_devices

    def wrap(self, model: nn.Module) -> nn.Module:
        return ReplicatedModel(model, device_ids=[*range(self.num_devices)])

    def average_probe(self, value: float) -> Sequence[float]:
        return [value]  # of one rank
