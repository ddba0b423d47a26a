"""Reductions as torch has them, where torch_xla 2.8 has others.

In torch `x.sum(())` is over all dimensions, and a dimension that is out of range or named twice is
an error. torch_xla takes the first to be over none, and gives back what it was given; the second
ends the process. It counts in booleans, so that `count_nonzero` is 1 at most. And sums and means of
16 bits are taken in 16 bits, which on a CPU are rounded after each addition: here they are in
float32, as in eager, in backward passes too.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from accbench.engines.xla.kernels import registration
from accbench.engines.xla_common import half_ops

Dims = Sequence[int] | None
Kernel = Callable[..., Any]

aten = torch.ops.aten


@cache
def replace_kernels() -> None:
    """For all that is computed on XLA's device in this process."""
    registration.replace(_KERNELS, "XLA")


def _places(given: torch.Tensor, dims: Dims) -> list[int]:
    """These dimensions, all of them where none is named; or torch's own errors."""
    num = given.dim()
    if not dims:
        return [*range(num)]
    found: list[int] = []
    least = max(num, 1)
    for dim in dims:
        if not -least <= dim < least:
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-least}, {least - 1}], "
                f"but got {dim})"
            )
        if dim % least in found:
            raise RuntimeError(f"dim {dim % least} appears multiple times in the list of dims")
        found.append(dim % least)
    return found if num else []


def _check_floating(what: str, dtype: torch.dtype) -> None:
    """Torch refuses whole numbers as well; of these and of complex ones XLA ends the process."""
    if not dtype.is_floating_point:
        raise RuntimeError(f"{what} needs a floating point dtype under engine xla, not {dtype}")


def _empty(given: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty(0, dtype=dtype or given.dtype, device=given.device)


# The forms that write into a tensor lead to torch_xla's own kernels still.
def _extreme(into: Kernel, least: float) -> Kernel:
    def kernel(given: torch.Tensor, dims: Dims = (), keepdim: bool = False) -> Any:
        places = _places(given, dims)
        found = into(given, places, keepdim, out=_empty(given))
        if not given.is_floating_point() or not given.numel():
            return found
        # Of infinite numbers alone torch_xla gives the largest finite one.
        return torch.where((given == least).all(places, keepdim), least, found)

    return kernel


def _sum(
    given: torch.Tensor, dims: Dims, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    counts = not (given.is_floating_point() or given.is_complex())
    made = dtype or (torch.int64 if counts else given.dtype)
    return _added(torch.sum, given, dims, keepdim, made)


def _mean(
    given: torch.Tensor, dims: Dims, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    made = dtype or given.dtype
    _check_floating("mean", made)
    if not given.is_floating_point():
        given = given.to(made)
    return _added(torch.mean, given, dims, keepdim, made)


def _added(into: Kernel, given: torch.Tensor, dims: Dims, keepdim: bool, made: torch.dtype) -> Any:
    by = torch.float32 if made in half_ops.HALF_DTYPES else made
    return into(given, _places(given, dims), keepdim, dtype=by, out=_empty(given, by)).to(made)


def _of_all(kernel: Kernel) -> Kernel:
    """The form that takes no dimensions."""

    def whole(given: torch.Tensor, *, dtype: torch.dtype | None = None) -> Any:
        return kernel(given, None, dtype=dtype)

    return whole


def _logsumexp(given: torch.Tensor, dims: Dims, keepdim: bool = False) -> Any:
    if not given.is_floating_point():
        given = given.to(torch.get_default_dtype())
    places = _places(given, dims)
    if not given.numel():
        return torch.logsumexp(given, places, keepdim, out=_empty(given))
    # Where all are infinite their largest cannot be taken from them.
    most = given.amax(places, keepdim=True)
    most = torch.where(most.abs() == torch.inf, 0, most)
    shape = given.sum(places, keepdim=keepdim).shape
    return ((given - most).exp().sum(places, keepdim=True).log() + most).reshape(shape).clone()


def _vector_norm(
    given: torch.Tensor,
    order: float = 2,
    dims: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    _check_floating("a vector's norm", given.dtype)
    dims, out = _places(given, dims), _empty(given, dtype)
    return torch.linalg.vector_norm(given, order, dims, keepdim, dtype=dtype, out=out)


def _norm(
    given: torch.Tensor,
    order: float | None,
    dims: Dims,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    return _vector_norm(given, 2 if order is None else order, dims, keepdim, dtype=dtype)


def _deviation(into: Kernel, *names: str) -> Kernel:
    def kernel(
        given: torch.Tensor,
        dims: Dims = None,
        *,
        correction: float | None = None,
        keepdim: bool = False,
    ) -> Any:
        _check_floating("a variance or deviation", given.dtype)
        outs = {name: _empty(given) for name in names}
        return into(given, _places(given, dims), correction=correction, keepdim=keepdim, **outs)

    return kernel


def _count_nonzero(given: torch.Tensor, dims: Any = None) -> torch.Tensor:
    return (given != 0).sum(dims)


_KERNELS: dict[str, Kernel] = {
    "amax": _extreme(torch.amax, -torch.inf),
    "amin": _extreme(torch.amin, torch.inf),
    "count_nonzero": _count_nonzero,
    "count_nonzero.dim_IntList": _count_nonzero,
    "linalg_vector_norm": _vector_norm,
    "logsumexp": _logsumexp,
    "max": _extreme(torch.amax, -torch.inf),
    "mean": _of_all(_mean),
    "mean.dim": _mean,
    "min": _extreme(torch.amin, torch.inf),
    "norm.ScalarOpt_dim": _norm,
    "norm.ScalarOpt_dim_dtype": _norm,
    "std.correction": _deviation(aten.std.correction_out, "out"),
    "std_mean.correction": _deviation(aten.std_mean.correction_out, "out0", "out1"),
    "sum": _of_all(_sum),
    "sum.dim_IntList": _sum,
    "var.correction": _deviation(aten.var.correction_out, "out"),
    "var_mean.correction": _deviation(aten.var_mean.correction_out, "out0", "out1"),
}
