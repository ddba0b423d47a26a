"""Which operations of a step leave the compiler, and where in the model they stand."""

import traceback
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from accbench.engines.common import source_location
from accbench.engines.xla.recording import num_fallbacks

# What Python asks of a tensor's content arrives as this operation.
_ASKS = {"aten::_local_scalar_dense": "its value is asked for (an `if`, .item() or int())"}
_MOST = 5


def _where() -> str:
    place, module = (
        source_location.in_model(traceback.extract_stack()),
        source_location.running_module(),
    )
    if place is None and module is None:
        return ", in the backward pass or the optimizer"
    return f"{f', in {module}' if module else ''}{f' at {place}' if place else ''}"


class Finder(TorchDispatchMode):
    """Looks at each operation in its block, and notes those that go to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, None] = {}  # as a set that keeps its order

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        before = num_fallbacks()
        result = function(*args, **(kwargs or {}))
        if num_fallbacks() > before:
            name = function.name().partition(".")[0]
            why = _ASKS.get(name, "for which XLA has no lowering here")
            self.found[f"{name}, {why}{_where()}"] = None
        return result

    def lines(self) -> list[str]:
        """One for each place, the first few."""
        lines = [*self.found]
        more = [f"and at {len(lines) - _MOST} other places"] if len(lines) > _MOST else []
        return lines[:_MOST] + more
