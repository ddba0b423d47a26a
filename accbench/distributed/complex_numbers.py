"""Tensors of complex numbers as real ones, for what knows no complex numbers.

torch's optimizers, norms and reductions take a complex number for two real ones, its parts; so
what is done to the parts of a tensor is what torch does to the tensor.
"""

import torch
from torch import nn

_MARK = ":complex"


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as (..., 2), in its memory where that can be; a real one as it is."""
    if not tensor.is_complex():
        return tensor
    return torch.view_as_real(tensor.resolve_conj().resolve_neg())


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in double precision, a complex one as (..., 2)."""
    return real(tensor).double()


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of floats, real or complex, in double precision; others as they are."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def singled(tensor: torch.Tensor) -> torch.Tensor:
    """Likewise in single precision."""
    if tensor.is_complex():
        return tensor.to(torch.complex64)
    return tensor.float() if tensor.is_floating_point() else tensor


def double(net: nn.Module) -> nn.Module:
    """Have a network compute in double precision; torch's `to` drops imaginary parts."""
    return net._apply(doubled)


def as_real(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors for formats without complex numbers; those have a mark in their names."""
    return {
        f"{name}{_MARK}" if tensor.is_complex() else name: real(tensor).contiguous()
        for name, tensor in tensors.items()
    }


def as_complex(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what `as_real` was given."""
    return {
        name.removesuffix(_MARK): torch.view_as_complex(tensor) if name.endswith(_MARK) else tensor
        for name, tensor in tensors.items()
    }
