"""Checks of a model's calls before torch_xla runs them, which may abort the process.

For operands whose shapes do not fit torch_xla 2.8 raises an error of its own, with a C++ stack, or
for some operations, matrix products among them, none at all. So each new signature of arguments is
tried on fake tensors first; an error there that plain torch on the host raises, too, is raised as
plain torch raises it.
"""

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from accbench.data import nested
from accbench.engines.common import extra_inputs, model_errors, python_state


def check_calls(model: nn.Module) -> None:
    """Register a hook that tries each new signature of arguments on fake tensors."""
    seen: set[Any] = set()

    def check(module: nn.Module, args: Any, kwargs: Any) -> None:
        signature = nested.signature((args, kwargs)), module.training
        # A trial would consume the extra inputs of the step's own pass.
        if signature in seen or extra_inputs.sources:
            return
        seen.add(signature)  # first, for the trials below call this hook, too
        error = _fake_error(module, args, kwargs)
        if error is None:
            return
        eager_error = model_errors.error_of_call(module, lambda: _run_on_host(module, args, kwargs))
        if type(eager_error) is type(error):
            raise eager_error from None

    model.register_forward_pre_hook(check, with_kwargs=True)


def _fake_error(module: nn.Module, args: Any, kwargs: Any) -> Exception | None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with python_state.restored(module), model_errors.unlogged():
        try:
            with mode, torch.no_grad():
                _call(module, args, kwargs, mode.from_tensor)
        except Exception as error:
            return error
    return None


def _run_on_host(module: nn.Module, args: Any, kwargs: Any) -> None:
    with torch.no_grad():
        _call(module, args, kwargs, lambda tensor: tensor.detach().cpu())


def _call(module: nn.Module, args: Any, kwargs: Any, replace: Any) -> None:
    """Call a module with every tensor of it and of the arguments replaced by `replace(tensor)`."""
    replacements: dict[int, torch.Tensor] = {}

    def replacement_of(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in replacements:  # tied tensors stay tied
            replacements[id(tensor)] = replace(tensor)
        return replacements[id(tensor)]

    tensors = {
        name: replacement_of(p) for name, p in module.named_parameters(remove_duplicate=False)
    }
    tensors |= {name: replacement_of(b) for name, b in module.named_buffers(remove_duplicate=False)}
    args, kwargs = tree_map_only(torch.Tensor, replacement_of, (args, kwargs))
    torch.func.functional_call(module, tensors, args, kwargs, tie_weights=False)
