"""Kernels of ours in the places of torch_xla's, and what they compute with."""

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch

from accbench.engines.xla import importing

# Kept, for their end would take the kernels back.
_libraries: list[torch.library.Library] = []


def replace(kernels: Mapping[str, Callable[..., Any]], *keys: str) -> None:
    """For all that is computed on XLA's device in this process.

    Args:
        kernels: by torch's name of the operation, without `aten::`.
        keys: "XLA", or "AutogradXLA" for what is differentiated operation by operation. Under
            `torch.inference_mode` the first alone is looked at. Kernels for it have views without
            what torch_xla 2.8 else has around them: no permutation of a permutation, whose values
            are wrong, and no view as a result, into which nothing can be copied then.
    """
    importing.torch_xla()  # or its kernels would come after ours
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    with warnings.catch_warnings():  # of kernels that are replaced
        warnings.simplefilter("ignore", UserWarning)
        for name, kernel in kernels.items():
            for key in keys:
                library.impl(name, kernel, key, allow_override=True)


def constant(device: torch.device, make: Callable[..., np.ndarray], *args: Any) -> torch.Tensor:
    """`make(*args)` on the device; sent once, for what is sent anew is another input of a graph."""
    kept = _constant(device, make, *args)
    # Or there would be no views of it, see `Engine.calling`.
    return kept.clone() if torch.is_inference_mode_enabled() else kept


@cache
def _constant(device: torch.device, make: Callable[..., np.ndarray], *args: Any) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.from_numpy(make(*args)).to(device)
