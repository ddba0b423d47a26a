"""Operations of a step that leave the compiler, and their lines in the model."""

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from accbench.engines.common import extra_inputs, model_state, source_location
from accbench.engines.xla.recording import num_fallbacks

# Reading a tensor's value in Python dispatches this operation.
_REASONS = {"aten::_local_scalar_dense": "its value is asked for (an `if`, .item() or int())"}
_MAX_LINES = 5


def _location() -> str:
    line, module_class = (
        source_location.find_model_line(traceback.extract_stack()),
        source_location.running_module_class(),
    )
    if line is None and module_class is None:
        return ", in the backward pass or the optimizer"
    return f"{f', in {module_class}' if module_class else ''}{f' at {line}' if line else ''}"


class FallbackFinder(TorchDispatchMode):
    """Dispatch mode that records the operations in its block that run on the host."""

    def __init__(self) -> None:
        super().__init__()
        self._reports: dict[str, None] = {}  # as a set that keeps its order

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        before = num_fallbacks()
        result = function(*args, **(kwargs or {}))
        if num_fallbacks() > before:
            name = function.name().partition(".")[0]
            why = _REASONS.get(name, "for which XLA has no lowering here")
            self._reports[f"{name}, {why}{_location()}"] = None
        return result

    def lines(self) -> list[str]:
        """Return one line for each operation and location, the first few."""
        lines = [*self._reports]
        rest = [f"and at {len(lines) - _MAX_LINES} other places"] if len(lines) > _MAX_LINES else []
        return lines[:_MAX_LINES] + rest


def find(
    run_again: Callable[[], None], model: nn.Module, optimizer: torch.optim.Optimizer
) -> list[str]:
    """Find the operations of a step that leave the compiler; returns a line for each.

    It runs forward and backward pass once more for that alone, and leaves no gradient and no
    change of a buffer or of extra state. The step that counts is not observed: under a dispatch
    mode, torch_xla slices the result of `repeat` wrongly.

    Args:
        run_again: runs forward and backward pass.
        model: whose buffers and extra state stay as they are.
        optimizer: whose parameters have no gradient afterwards.
    """
    import torch_xla

    saved_buffers = [(module, dict(module._buffers)) for module in model.modules()]
    extra = model_state.read_extra(model)
    copies = {id(buffer): buffer.detach().clone() for buffer in model.buffers()}
    for module, buffers in saved_buffers:  # a copy back would make another program
        module._buffers.update({n: b if b is None else copies[id(b)] for n, b in buffers.items()})
    torch_xla.sync()
    with FallbackFinder() as finder, extra_inputs.replaced(extra_inputs.tensors()):
        run_again()
    optimizer.zero_grad(set_to_none=True)
    for module, buffers in saved_buffers:
        module._buffers.update(buffers)
    model_state.load_extra(model, extra)
    return finder.lines()
