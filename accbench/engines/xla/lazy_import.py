"""Import of torch_xla without TorchInductor, which training through it never uses.

torch_xla imports its bridge to TorchDynamo, and for the base class of a pass of that bridge all of
TorchInductor: more than half of the processor time that a worker takes to import torch_xla. Only
`torch.compile(backend="openxla")` and exports to StableHLO need the bridge, so it is imported when
one of them first reads one of its attributes.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_LAZY_MODULE = "torch_xla._dynamo.dynamo_bridge"


class _OnFirstRead(Loader):
    """Loader that executes a module when one of its attributes is first read.

    Unlike `importlib.util.LazyLoader` it does so only for attributes that the module lacks: torch
    reads `__file__` of every module.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        def get_attribute(name: str) -> Any:
            if vars(module).pop("__getattr__", None):  # else another thread has loaded it
                self.loader.exec_module(module)
            return getattr(module, name)

        vars(module)["__getattr__"] = get_attribute


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _LAZY_MODULE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _OnFirstRead(spec.loader)
        return spec


def torch_xla() -> ModuleType:
    """Import torch_xla, and its bridge to TorchDynamo only when that is first used."""
    if "torch_xla" not in sys.modules:
        from torch import nn

        gru, finder = nn.GRU, _Finder()
        sys.meta_path.insert(0, finder)
        try:
            import torch_xla  # noqa: F401
        finally:
            sys.meta_path.remove(finder)
        # torch_xla replaces nn.GRU for models that are built later, by a class without packed
        # sequences, and without the second direction unless that is a keyword argument.
        nn.GRU = gru  # type: ignore[misc]
    return sys.modules["torch_xla"]
