"""Operations named by the module of the model that they come from, in XLA's metadata.

torch_xla gives an operation the scopes that are open when it is traced (with XLA_IR_DEBUG=1).
Forward, a module's scope is open while it runs. Backward, autograd runs no module's code: there
a hook on the result's node of the graph opens its module's scope until the next one's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

BACKWARD = "backward"


@contextmanager
def named(model: nn.Module) -> Iterator[None]:
    """Name the operations of `model`, and of its backward pass, in this block."""
    import torch_xla

    push = torch_xla._XLAC.profiler.scope_pusher
    open_scopes: list[Any] = []
    of_backward: list[Any] = []
    handles = []

    def enter(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any) -> None:
            open_scopes.append(push(name))

        return hook

    def leave(path: str) -> Any:
        def switch(_gradients: Any) -> None:
            of_backward.clear()  # closes the one before, which is not inside of this one
            of_backward.append(push(f"{BACKWARD}.{path}"))

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
        if of_backward:
            _in_autograds_thread(of_backward.clear, model)


def _in_autograds_thread(act: Callable[[], None], model: nn.Module) -> None:
    """A scope that a backward pass opened is of its thread; elsewhere its end is an abort."""
    result = torch.ones((), device=next(model.parameters()).device, requires_grad=True) * 1
    result.register_hook(lambda _gradient: act())
    result.backward()
