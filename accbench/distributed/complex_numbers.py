"""Complex tensors as real ones, for code that supports real numbers only.

torch's optimizers, norms and reductions treat a complex number as two real ones, its parts; so an
operation on the parts of a tensor is what torch does to the tensor.
"""

from typing import Any

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


def stored_as(name: str, tensor: Any) -> tuple[str, list[int], torch.dtype]:
    """Return the name, shape and type that `as_real` gives a tensor, or what has its metadata."""
    if not tensor.dtype.is_complex:
        return name, [*tensor.shape], tensor.dtype
    return f"{name}{_MARK}", [*tensor.shape, 2], tensor.dtype.to_real()


def decoded(stored_name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of `as_real`, or leading rows of it, as it was; the name tells."""
    return torch.view_as_complex(tensor) if is_marked(stored_name) else tensor


def is_marked(stored_name: str) -> bool:
    """Return whether `as_real` has encoded a complex tensor under this name."""
    return stored_name.endswith(_MARK)


def without_mark(stored_name: str) -> str:
    """Return the name of what `as_real` has stored under another."""
    return stored_name.removesuffix(_MARK)


def as_complex(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Decode what `as_real` has encoded."""
    return {without_mark(name): decoded(name, tensor) for name, tensor in tensors.items()}
