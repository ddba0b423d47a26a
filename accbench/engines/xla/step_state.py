"""The tensors that a step changes, in the order in which its graph returns them."""

import torch
from torch import nn


def read_in_order(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Have the graph take what the step changes in the order in which it returns it.

    A new value is written over an old one. torch_xla says of which inputs the memory is free, and
    XLA hands it out to results of equal size by their order; a value that is written over another
    one's memory is computed elsewhere and copied. Inputs are numbered by who reads them first:
    here one operation, which leaves nothing behind, its last operand first. Results come in the
    order in which their tensors were made, buffers last and in the model's order, because each
    step makes new ones.
    """
    import torch_xla.core.xla_model as xm

    xm.optimization_barrier_(in_order(model, optimizer, device)[::-1])


def in_order(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> list[torch.Tensor]:
    """List parameters and the optimizer's state in the order they were made, then buffers."""
    import torch_xla

    parameters = {p: None for group in optimizer.param_groups for p in group["params"]}
    states = (optimizer.state.get(p, {}).values() for p in parameters)
    tensors = [*parameters, *(tensor for state in states for tensor in state)]
    unique = {id(t): t for t in tensors if isinstance(t, torch.Tensor) and t.device == device}
    buffers = {id(b): b for b in model.buffers() if b.device == device}
    return [*sorted(unique.values(), key=torch_xla._XLAC._xla_get_tensor_id), *buffers.values()]
