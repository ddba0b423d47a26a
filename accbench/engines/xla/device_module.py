"""The module `torch.xla`, which torch looks up by device type; torch_xla does not provide it.

Activation checkpointing (`torch.utils.checkpoint`) looks it up: for the random state before a
forward pass, to be restored while that pass is repeated, and for autocast.
"""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch


def register() -> None:
    """Register the module with torch, once per training process."""
    if not hasattr(torch, "xla"):
        torch._register_device_module("xla", _module())


def _module() -> types.ModuleType:
    import torch_xla.core.xla_model as xm

    module = types.ModuleType("torch.xla", __doc__)

    def get_rng_state(device: Any = None) -> torch.Tensor:
        """Return the seed of XLA's generator, (8,) uint8."""
        seed = int(xm.get_rng_state()) % 2**64
        return torch.tensor([*seed.to_bytes(8, "little")], dtype=torch.uint8)

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        xm.set_rng_state(int.from_bytes(bytes(state.tolist()), "little"))

    @contextlib.contextmanager
    def device(index: Any) -> Iterator[None]:
        yield  # a process has one

    functions = {
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "device": device,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    for name, function in functions.items():
        setattr(module, name, function)
    module._initialized = True  # type: ignore[attr-defined]  # without it torch saves no random state
    return module
