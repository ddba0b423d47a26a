"""torch_xla without TorchInductor, which it imports and which training through it never uses.

torch_xla imports its bridge to TorchDynamo, and for the base class of a pass of that bridge all of
TorchInductor: more than half of the processor time that a worker takes to import torch_xla. The
bridge is needed by `torch.compile(backend="openxla")` and by exports to StableHLO alone, so it is
imported when one of them first looks into it.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_LATE = "torch_xla._dynamo.dynamo_bridge"


class _WhenLookedInto(Loader):
    """What `importlib.util.LazyLoader` does, but not for what the module has by then: torch goes
    through all modules for their `__file__`."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        def look(name: str) -> Any:
            if vars(module).pop("__getattr__", None):  # else another thread was faster
                self.loader.exec_module(module)
            return getattr(module, name)

        vars(module)["__getattr__"] = look


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _LATE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _WhenLookedInto(spec.loader)
        return spec


def torch_xla() -> ModuleType:
    """Import torch_xla, its bridge to TorchDynamo only when that is first used."""
    if "torch_xla" not in sys.modules:
        from torch import nn

        gru, finder = nn.GRU, _Finder()
        sys.meta_path.insert(0, finder)
        try:
            import torch_xla  # noqa: F401
        finally:
            sys.meta_path.remove(finder)
        # It has put a class of its own there, for models that are built later: without packed
        # sequences, and without the second direction where that is not given by name.
        nn.GRU = gru  # type: ignore[misc]
    return sys.modules["torch_xla"]
