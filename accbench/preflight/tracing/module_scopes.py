"""Names of operations in XLA's metadata: the module of the model that they come from.

torch_xla gives an operation the scopes that are open when it is traced (with XLA_IR_DEBUG=1). In
the forward pass a module's scope is open while it runs. In the backward pass autograd runs no
module's code: there a hook on the result's node of the graph opens its module's scope, until the
next module's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

BACKWARD = "backward"


@contextmanager
def name_operations(model: nn.Module) -> Iterator[None]:
    """Name the operations of a model, and of its backward pass, in the block."""
    import torch_xla

    push = torch_xla._XLAC.profiler.scope_pusher
    open_scopes: list[Any] = []
    backward_scope: list[Any] = []
    handles = []

    def enter(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any) -> None:
            open_scopes.append(push(name))

        return hook

    def leave(path: str) -> Any:
        def switch(_gradients: Any) -> None:
            backward_scope.clear()  # closes the previous scope, which does not enclose this one
            backward_scope.append(push(f"{BACKWARD}.{path}"))

        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            open_scopes.pop()
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                output.grad_fn.register_prehook(switch)

        return hook

    for path, module in model.named_modules():
        if not path:
            continue
        handles.append(module.register_forward_pre_hook(enter(path.rpartition(".")[2])))
        handles.append(module.register_forward_hook(leave(path), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        if backward_scope:
            _run_in_autograd_thread(backward_scope.clear, model)


def _run_in_autograd_thread(function: Callable[[], None], model: nn.Module) -> None:
    """Run a function in autograd's thread.

    A scope that a backward pass opened belongs to its thread; closing it in another one aborts
    the process.
    """
    result = torch.ones((), device=next(model.parameters()).device, requires_grad=True) * 1
    result.register_hook(lambda _gradient: function())
    result.backward()
