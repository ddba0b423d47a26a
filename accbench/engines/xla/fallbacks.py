"""Operations of a step that leave the compiler, and their lines in the model."""

import traceback
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from accbench.engines.common import source_location
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
