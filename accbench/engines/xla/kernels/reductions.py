"""Reductions as torch computes them, where torch_xla 2.8 differs.

In torch `x.sum(())` is over all dimensions, and a dimension that is out of range or named twice is
an error. torch_xla takes the first to be over none, and returns its input; the second aborts the
process. It counts in booleans, so that `count_nonzero` is 1 at most. And it computes sums and means
of 16-bit values in 16 bits, which on a CPU are rounded after each addition: here they are in
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
    """Register these kernels for XLA's device in this process."""
    registration.replace(_KERNELS, "XLA")


def _normalised_dims(values: torch.Tensor, dims: Dims) -> list[int]:
    """Return non-negative dimensions, all of them where none is named.

    Raises:
        IndexError: a dimension is out of range.
        RuntimeError: a dimension is named twice.
    """
    num_dims = values.dim()
    if not dims:
        return [*range(num_dims)]
    normalised: list[int] = []
    limit = max(num_dims, 1)
    for dim in dims:
        if not -limit <= dim < limit:
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-limit}, {limit - 1}], "
                f"but got {dim})"
            )
        if dim % limit in normalised:
            raise RuntimeError(f"dim {dim % limit} appears multiple times in the list of dims")
        normalised.append(dim % limit)
    return normalised if num_dims else []


def _check_floating(what: str, dtype: torch.dtype) -> None:
    """Raise RuntimeError unless a dtype is floating point.

    torch refuses integers as well; XLA aborts the process for these and for complex numbers.
    """
    if not dtype.is_floating_point:
        raise RuntimeError(f"{what} needs a floating point dtype under engine xla, not {dtype}")


def _empty(values: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty(0, dtype=dtype or values.dtype, device=values.device)


# The out= forms still call torch_xla's own kernels.
def _extreme(xla_kernel: Kernel, identity: float) -> Kernel:
    def kernel(values: torch.Tensor, dims: Dims = (), keepdim: bool = False) -> Any:
        dims_used = _normalised_dims(values, dims)
        extremes = xla_kernel(values, dims_used, keepdim, out=_empty(values))
        if not values.is_floating_point() or not values.numel():
            return extremes
        # Where all values are infinite torch_xla returns the largest finite one.
        return torch.where((values == identity).all(dims_used, keepdim), identity, extremes)

    return kernel


def _sum(
    values: torch.Tensor, dims: Dims, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    is_integral = not (values.is_floating_point() or values.is_complex())
    out_dtype = dtype or (torch.int64 if is_integral else values.dtype)
    return _accumulate(torch.sum, values, dims, keepdim, out_dtype)


def _mean(
    values: torch.Tensor, dims: Dims, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    out_dtype = dtype or values.dtype
    _check_floating("mean", out_dtype)
    if not values.is_floating_point():
        values = values.to(out_dtype)
    return _accumulate(torch.mean, values, dims, keepdim, out_dtype)


def _accumulate(
    xla_kernel: Kernel, values: torch.Tensor, dims: Dims, keepdim: bool, out_dtype: torch.dtype
) -> Any:
    compute_dtype = torch.float32 if out_dtype in half_ops.HALF_DTYPES else out_dtype
    return xla_kernel(
        values,
        _normalised_dims(values, dims),
        keepdim,
        dtype=compute_dtype,
        out=_empty(values, compute_dtype),
    ).to(out_dtype)


def _over_all_dims(kernel: Kernel) -> Kernel:
    """Return the form of a kernel that takes no dimensions."""

    def full_reduction(values: torch.Tensor, *, dtype: torch.dtype | None = None) -> Any:
        return kernel(values, None, dtype=dtype)

    return full_reduction


def _logsumexp(values: torch.Tensor, dims: Dims, keepdim: bool = False) -> Any:
    if not values.is_floating_point():
        values = values.to(torch.get_default_dtype())
    dims_used = _normalised_dims(values, dims)
    if not values.numel():
        return torch.logsumexp(values, dims_used, keepdim, out=_empty(values))
    # An infinite maximum cannot be subtracted.
    maximum = values.amax(dims_used, keepdim=True)
    maximum = torch.where(maximum.abs() == torch.inf, 0, maximum)
    shape = values.sum(dims_used, keepdim=keepdim).shape
    return (
        ((values - maximum).exp().sum(dims_used, keepdim=True).log() + maximum)
        .reshape(shape)
        .clone()
    )


def _vector_norm(
    values: torch.Tensor,
    order: float = 2,
    dims: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    _check_floating("a vector's norm", values.dtype)
    dims, out = _normalised_dims(values, dims), _empty(values, dtype)
    return torch.linalg.vector_norm(values, order, dims, keepdim, dtype=dtype, out=out)


def _norm(
    values: torch.Tensor,
    order: float | None,
    dims: Dims,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    return _vector_norm(values, 2 if order is None else order, dims, keepdim, dtype=dtype)


def _deviation(xla_kernel: Kernel, *names: str) -> Kernel:
    def kernel(
        values: torch.Tensor,
        dims: Dims = None,
        *,
        correction: float | None = None,
        keepdim: bool = False,
    ) -> Any:
        _check_floating("a variance or deviation", values.dtype)
        outs = {name: _empty(values) for name in names}
        return xla_kernel(
            values, _normalised_dims(values, dims), correction=correction, keepdim=keepdim, **outs
        )

    return kernel


def _count_nonzero(values: torch.Tensor, dims: Any = None) -> torch.Tensor:
    return (values != 0).sum(dims)


_KERNELS: dict[str, Kernel] = {
    "amax": _extreme(torch.amax, -torch.inf),
    "amin": _extreme(torch.amin, torch.inf),
    "count_nonzero": _count_nonzero,
    "count_nonzero.dim_IntList": _count_nonzero,
    "linalg_vector_norm": _vector_norm,
    "logsumexp": _logsumexp,
    "max": _extreme(torch.amax, -torch.inf),
    "mean": _over_all_dims(_mean),
    "mean.dim": _mean,
    "min": _extreme(torch.amin, torch.inf),
    "norm.ScalarOpt_dim": _norm,
    "norm.ScalarOpt_dim_dtype": _norm,
    "std.correction": _deviation(aten.std.correction_out, "out"),
    "std_mean.correction": _deviation(aten.std_mean.correction_out, "out0", "out1"),
    "sum": _over_all_dims(_sum),
    "sum.dim_IntList": _sum,
    "var.correction": _deviation(aten.var.correction_out, "out"),
    "var_mean.correction": _deviation(aten.var_mean.correction_out, "out0", "out1"),
}
