"""Registration of kernels in place of torch_xla's, and the constants that they use."""

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch

from accbench.engines.xla import lazy_import

# Kept alive: a library that is collected takes its kernels back.
_LIBRARIES: list[torch.library.Library] = []


def replace(kernels: Mapping[str, Callable[..., Any]], *keys: str) -> None:
    """Register kernels for XLA's device in this process.

    Args:
        kernels: by torch's name of the operation, without `aten::`.
        keys: dispatch keys: "XLA", or "AutogradXLA" for what is differentiated operation by
            operation. Under `torch.inference_mode` only the first is looked up. Kernels for
            "XLA" get views without the handling that torch_xla 2.8 otherwise adds: they must not
            permute a permutation, whose values are wrong, nor return a view, into which nothing
            can be copied then. So they clone.
    """
    lazy_import.torch_xla()  # first, or its kernels would replace ours
    library = torch.library.Library("aten", "IMPL")
    _LIBRARIES.append(library)
    with warnings.catch_warnings():  # about kernels that are replaced
        warnings.simplefilter("ignore", UserWarning)
        for name, kernel in kernels.items():
            for key in keys:
                library.impl(name, kernel, key, allow_override=True)


def constant(device: torch.device, make: Callable[..., np.ndarray], *args: Any) -> torch.Tensor:
    """Return `make(*args)` on the device.

    It is sent once, for a tensor that is sent again is another input of the graph.
    """
    tensor = _cached_constant(device, make, *args)
    # An inference tensor made outside has no views here, see `Engine.calling`.
    return tensor.clone() if torch.is_inference_mode_enabled() else tensor


@cache
def _cached_constant(
    device: torch.device, make: Callable[..., np.ndarray], *args: Any
) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.from_numpy(make(*args)).to(device)
