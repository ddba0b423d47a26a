"""A mock: torch.nn.DataParallel whose devices are all the CPU, as machines without GPUs have none.

Batches are cut and outputs joined by torch's operations for the CPU, in place of those of CUDA.
The rest is the real thing: torch's replicas, a thread for each, and accbench's strategy.
"""

import importlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from accbench.data import nested
from accbench.distributed.strategies.one_process import OneProcess, ReplicatedModel
from accbench.engines.ddp import engine as ddp
from accbench.engines.ddp.options import DdpOptions


def _scatter(inputs: Any, kwargs: Any, device_ids: Any, dim: int) -> Any:
    parts = [
        nested.with_tensors((inputs, kwargs), list(tensors))
        for tensors in zip(
            *(t.chunk(len(device_ids), dim) for t in nested.tensors_of((inputs, kwargs))),
            strict=True,
        )
    ]
    return tuple(part[0] for part in parts), tuple(part[1] for part in parts)


def _broadcast(tensors: Any, devices: Any, detach: bool = False) -> list[list[torch.Tensor]]:
    if detach:  # the first device has its own
        return [[*tensors], *([t.detach().clone() for t in tensors] for _ in devices[1:])]
    return [[t.clone() for t in tensors] for _ in devices]


def _parallel_apply(modules: Any, inputs: Any, kwargs_tup: Any, devices: Any) -> list[Any]:
    is_grad, is_autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    outputs: list[Any] = [None] * len(modules)

    def call(index: int) -> None:
        with torch.set_grad_enabled(is_grad), torch.autocast("cpu", enabled=is_autocast):
            outputs[index] = modules[index](*inputs[index], **kwargs_tup[index])

    for index in range(len(modules)):  # in turn: what they draw then has an order
        thread = threading.Thread(target=call, args=(index,))
        thread.start()
        thread.join()
    return outputs


def _gather(outputs: Any, device: Any, dim: int) -> Any:
    outputs = [output.reshape(-1) if output.dim() == 0 else output for output in outputs]
    return torch.cat(outputs, dim)


def patch(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Have torch.nn.DataParallel take the CPU for its devices, in this process from now on."""
    # Attributes of the package by these names are functions.
    module = importlib.import_module("torch.nn.parallel.data_parallel")
    set_attribute(module, "scatter_kwargs", _scatter)
    set_attribute(module, "parallel_apply", _parallel_apply)
    set_attribute(module, "gather", _gather)
    set_attribute(module, "_get_available_device_type", lambda: "cuda")
    set_attribute(module, "_check_balance", lambda _: None)
    module = importlib.import_module("torch.nn.parallel.replicate")
    set_attribute(module, "_broadcast_coalesced_reshape", _broadcast)


def on_cpu(model: ReplicatedModel) -> ReplicatedModel:
    """Return a model of `patch`'s DataParallel with all of its devices the CPU."""
    model.src_device_obj = torch.device("cpu")
    return model


class OnCpu(OneProcess):
    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        wrapped: Any = super().wrap(model)
        return on_cpu(wrapped)


class Engine(ddp.Engine):
    """Engine ddp whose `data_parallel` has CPUs for devices."""

    Options = DdpOptions

    @classmethod
    def unavailable_reason(cls, task: Any) -> str | None:
        return None

    def __init__(self, task: Any, options: Any, topology: Any) -> None:
        super().__init__(task, options, topology)
        patch()
        self.strategy = OnCpu(topology, self.device, options.data_parallel)

    @property
    def _other_devices(self) -> list[torch.device]:
        return []


def install(folder: Path) -> Path:
    """Write an entry point for the engine `on_cpu` into `folder`, and return it."""
    info = folder / "data_parallel_on_cpu-1.0.dist-info"
    info.mkdir(parents=True)
    name = "data-parallel-on-cpu"
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    entry = f"[accbench.engines]\non_cpu = {__name__}:Engine\n"
    (info / "entry_points.txt").write_text(entry)
    return folder
