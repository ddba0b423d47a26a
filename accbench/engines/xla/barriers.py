"""Boundaries in a traced graph that XLA does not optimise across."""

from typing import Any

import torch

from accbench.data import nested


def recompute_barrier(inputs: Any, gradient: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Copy a checkpointed module's inputs and its gradient behind a barrier.

    XLA would find what was computed before, and keep that. A barrier hides that it is the same,
    and has it wait for the gradient: else all would be computed again at once.
    """
    import torch_xla.core.xla_model as xm

    tensors = nested.tensors_of(inputs)
    copies = [tensor.detach().clone() for tensor in tensors]
    gradient = gradient.clone()
    xm.optimization_barrier_([gradient, *copies])
    for tensor, copy in zip(tensors, copies, strict=True):
        copy.requires_grad_(tensor.requires_grad)
    return nested.with_tensors(inputs, copies), gradient
