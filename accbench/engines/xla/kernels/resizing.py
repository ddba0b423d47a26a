"""Interpolation, adaptive means and `Tensor.unfold`, which stay in the graph and are torch's.

torch_xla 2.8 takes no notice of a scale that is not the quotient of the sizes: at
`scale_factor=1.7`, which makes 15 pixels of 9, it computes what `size=15` would be. On a CPU the
gradients of all interpolation leave the compiler, adaptive means whose windows are not alike, and
unfolding. Here each axis is resampled by itself: by a matrix of weights where values are mixed,
and by picking where the nearest is taken.
"""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from torch.nn import functional

from accbench.engines.xla.kernels import registration
from accbench.engines.xla_common import half_ops, resampling
from accbench.engines.xla_common.resampling import MatrixBuilder, Scale


@cache
def replace_kernels() -> None:
    """For all that is computed on XLA's device in this process."""
    found: dict[str, Callable[..., torch.Tensor]] = {
        **{name: _mixing(*of) for name, of in resampling.INTERPOLATIONS.items()},
        **{name: _picking(*of) for name, of in resampling.NEAREST.items()},
        "_adaptive_avg_pool2d": _adaptive(functional.avg_pool2d),
        "_adaptive_avg_pool3d": _adaptive(functional.avg_pool3d),
    }
    # Under both, for `torch.inference_mode` passes by the first.
    registration.replace(found, "AutogradXLA", "XLA")
    # What a view becomes.
    registration.replace({"unfold_copy": _unfold, "unfold_backward": _folded}, "XLA")


def _resampled(given: torch.Tensor, matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Multiply each of the last axes by its matrix (new, old)."""
    wide = given.float() if given.dtype in half_ops.HALF_DTYPES else given
    with torch.autocast("xla", enabled=False):
        for axis, matrix in enumerate(matrices, given.dim() - len(matrices)):
            wide = torch.tensordot(wide, matrix.to(wide.dtype), ([axis], [1])).movedim(-1, axis)
            wide = wide.clone()  # see `kernels.replace`; XLA makes none
    return wide.to(given.dtype)


def _mixing(of: Matrix, rank: int) -> Callable[..., torch.Tensor]:
    def kernel(
        given: torch.Tensor, new: Sequence[int], align_corners: bool, *scales: Scale
    ) -> torch.Tensor:
        _check(given, rank)
        old = given.shape[-rank:]
        each = zip(old, new, scales or [None] * rank, strict=True)
        return _resampled(given, [
            registration.constant(given.device, of, size, output, align_corners, scale)
            for size, output, scale in each
        ])  # fmt: skip

    return kernel


def _picking(offset: float, rank: int) -> Callable[..., torch.Tensor]:
    def kernel(given: torch.Tensor, new: Sequence[int], *scales: Scale) -> torch.Tensor:
        _check(given, rank)
        each = zip(new, scales or [None] * rank, strict=True)
        for axis, (output, scale) in enumerate(each, given.dim() - rank):
            given = _picked(given, axis, output, scale, offset)
        return given.clone()  # see `kernels.replace`

    return kernel


def _picked(
    given: torch.Tensor, axis: int, output: int, scale: Scale, offset: float
) -> torch.Tensor:
    size = given.shape[axis]
    taken = resampling.nearest(size, output, scale, offset)
    times = output // size
    if times and np.array_equal(taken, np.arange(size).repeat(times)):
        # Its gradient is a sum, and not one addition after the other.
        shape = [*given.shape[: axis + 1], times, *given.shape[axis + 1 :]]
        return given.unsqueeze(axis + 1).expand(shape).flatten(axis, axis + 1)
    places = registration.constant(given.device, resampling.nearest, size, output, scale, offset)
    return given.index_select(axis, places)


def _adaptive(pool: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def kernel(given: torch.Tensor, new: Sequence[int]) -> torch.Tensor:
        rank = len(new)
        old = given.shape[-rank:]
        if all(output and size % output == 0 for size, output in zip(old, new, strict=True)):
            return pool(given, [size // output for size, output in zip(old, new, strict=True)])
        return _resampled(given, [
            registration.constant(given.device, resampling.adaptive_average, size, output)
            for size, output in zip(old, new, strict=True)
        ])  # fmt: skip

    return kernel


def _check(given: torch.Tensor, rank: int) -> None:
    if given.dim() != rank + 2:
        raise RuntimeError(
            f"It is expected input_size equals to {rank + 2}, but got size {given.dim()}"
        )


def _unfold(given: torch.Tensor, dimension: int, size: int, step: int) -> torch.Tensor:
    shape = torch.empty_like(given, device="meta").unfold(dimension, size, step).shape  # or error
    if not given.dim():
        return given.reshape(shape)
    axis = dimension % given.dim()
    places = registration.constant(given.device, _windows, shape[axis], size, step)
    found = given.index_select(axis, places).unflatten(axis, (-1, size)).movedim(axis + 1, -1)
    return found.clone()  # see `kernels.replace`


def _folded(
    gradient: torch.Tensor, shape: Sequence[int], dimension: int, size: int, step: int
) -> torch.Tensor:
    zeros = gradient.new_zeros(shape)
    if not zeros.dim():
        return gradient.reshape(shape)
    axis = dimension % len(shape)
    places = registration.constant(gradient.device, _windows, gradient.shape[axis], size, step)
    return zeros.index_add(axis, places, gradient.movedim(-1, axis + 1).flatten(axis, axis + 1))


def _windows(num: int, size: int, step: int) -> np.ndarray:
    return (np.arange(num)[:, None] * step + np.arange(size)).flatten()
