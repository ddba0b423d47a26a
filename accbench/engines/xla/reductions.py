"""`x.amax()` and `x.amin()`, which in torch are over all dimensions where none is named.

torch_xla 2.8 takes them to be over none, and gives back what it was given.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from accbench.engines.xla import importing

# To the form of each that writes into a tensor, which leads to torch_xla's own kernel still.
_INTO = {
    torch.ops.aten.amax.default: torch.ops.aten.amax.out,
    torch.ops.aten.amin.default: torch.ops.aten.amin.out,
}
# Kept, for its end would take the kernels back.
_library: list[torch.library.Library] = []


@cache
def replace_kernels() -> None:
    """For all that is computed on XLA's device in this process."""
    importing.torch_xla()  # or its kernels would come after ours
    library = torch.library.Library("aten", "IMPL")
    _library.append(library)
    with warnings.catch_warnings():  # of kernels that are replaced
        warnings.simplefilter("ignore", UserWarning)
        for operation, into in _INTO.items():
            library.impl(operation.name().removeprefix("aten::"), _over_all(into), "XLA")


def _over_all(into: Any) -> Callable[..., torch.Tensor]:
    def kernel(
        given: torch.Tensor, dims: Sequence[int] = (), keepdim: bool = False
    ) -> torch.Tensor:
        out = torch.empty(0, dtype=given.dtype, device=given.device)
        result: torch.Tensor = into(given, dims or [*range(given.dim())], keepdim, out=out)
        return result

    return kernel
