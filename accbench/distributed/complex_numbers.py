"""Complex tensors as real ones, for code that supports real numbers only.

torch's optimizers, norms and reductions treat a complex number as two real ones, its parts; so an
operation on the parts of a tensor is what torch does to the tensor.
"""

import torch
from torch import nn

_MARK = ":complex"


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as a real one (..., 2), a view if possible; a real one unchanged."""
    if not tensor.is_complex():
        return tensor
    return torch.view_as_real(tensor.resolve_conj().resolve_neg())


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float64, a complex one as (..., 2)."""
    return real(tensor).double()


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    """Return a real or complex floating tensor in double precision; others unchanged."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def singled(tensor: torch.Tensor) -> torch.Tensor:
    """Return a real or complex floating tensor in single precision; others unchanged."""
    if tensor.is_complex():
        return tensor.to(torch.complex64)
    return tensor.float() if tensor.is_floating_point() else tensor


def double(net: nn.Module) -> nn.Module:
    """Convert a network to double precision in place; torch's `to` drops imaginary parts."""
    return net._apply(doubled)


def as_real(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Encode tensors for formats without complex numbers; the names mark what was complex."""
    return {
        f"{name}{_MARK}" if tensor.is_complex() else name: real(tensor).contiguous()
        for name, tensor in tensors.items()
    }


def as_complex(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Decode what `as_real` has encoded."""
    return {
        name.removesuffix(_MARK): torch.view_as_complex(tensor) if name.endswith(_MARK) else tensor
        for name, tensor in tensors.items()
    }
