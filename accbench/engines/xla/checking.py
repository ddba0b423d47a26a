"""Calls of a model that are wrong, found before torch_xla: that ends the process, by abort().

Of operands whose shapes do not fit torch_xla 2.8 raises an error of its own, with a stack of C++,
or for some operations, products of matrices among them, none at all. So each new signature of
arguments is tried on shapes and types alone first; what fails there, and in plain torch on the host
likewise, is raised as plain torch has it.
"""

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from accbench.data import nested
from accbench.engines.common import extra_inputs, model_errors, python_state


def check_calls(model: nn.Module) -> None:
    """Have calls of the model be tried as said above."""
    seen: set[Any] = set()

    def check(module: nn.Module, args: Any, kwargs: Any) -> None:
        signature = nested.signature((args, kwargs)), module.training
        # A trial would take what those give to the step's own pass.
        if signature in seen or extra_inputs.sources:
            return
        seen.add(signature)  # the trials below come by here
        error = _fails_on_shapes(module, args, kwargs)
        if error is None:
            return
        by_itself = model_errors.of_call(module, lambda: _on_host(module, args, kwargs))
        if type(by_itself) is type(error):
            raise by_itself from None

    model.register_forward_pre_hook(check, with_kwargs=True)


def _fails_on_shapes(module: nn.Module, args: Any, kwargs: Any) -> Exception | None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with python_state.restored(module), model_errors.unlogged():
        try:
            with mode, torch.no_grad():
                _call(module, args, kwargs, mode.from_tensor)
        except Exception as error:
            return error
    return None


def _on_host(module: nn.Module, args: Any, kwargs: Any) -> None:
    with torch.no_grad():
        _call(module, args, kwargs, lambda tensor: tensor.detach().cpu())


def _call(module: nn.Module, args: Any, kwargs: Any, other: Any) -> None:
    """Call a module with another tensor in the place of each of its own and of the call's."""
    known: dict[int, torch.Tensor] = {}

    def of(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in known:  # tied ones stay tied
            known[id(tensor)] = other(tensor)
        return known[id(tensor)]

    tensors = {name: of(p) for name, p in module.named_parameters(remove_duplicate=False)}
    tensors |= {name: of(b) for name, b in module.named_buffers(remove_duplicate=False)}
    args, kwargs = tree_map_only(torch.Tensor, of, (args, kwargs))
    torch.func.functional_call(module, tensors, args, kwargs, tie_weights=False)
