"""The task's optimizer, in a form that never has XLA wait for the host."""

from typing import Any

import torch
from torch import nn

from accbench.config import TaskConfig
from accbench.engines import optimizers
from accbench.engines.common import optimizer_state
from accbench.engines.xla import optimizer_conversion, sync_free
from accbench.engines.xla.optimizer_conversion import Send


def build(
    task: TaskConfig, model: nn.Module, send: Send, fused: bool, fresh_step_tensors: bool
) -> Any:
    """Build the optimizer with its state.

    State that appears in the first step would make the second step another graph.

    Args:
        task: names the optimizer and its settings.
        model: on XLA's device.
        send: copies a tensor from the host to the device, with nothing left to compute.
        fused: see `sync_free.SyncFreeAdamW.as_vectors`.
        fresh_step_tensors: see `sync_free.SharedStepCounts`.
    """
    entry = optimizers.of_task(task)
    xla_class = entry.xla_class() or sync_free.class_from_update_rule(entry)
    optimizer: Any = xla_class(optimizer_state.groups(task, model), **entry.arguments(task))
    if isinstance(optimizer, sync_free.SyncFreeAdamW):
        optimizer.as_vectors = fused
    if isinstance(optimizer, sync_free.SharedStepCounts):
        optimizer.fresh_step_tensors = fresh_step_tensors

    def zeros_like(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype).to(tensor.device)

    optimizer_state.make_state(task, optimizer, zeros_like, lambda tensor: send(tensor.cpu()))

    def share_counts(optimizer: Any) -> None:
        optimizer_conversion.share_counts_on_device(optimizer, send)

    share_counts(optimizer)
    optimizer.register_load_state_dict_post_hook(share_counts)
    return optimizer
