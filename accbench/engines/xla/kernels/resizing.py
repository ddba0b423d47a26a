"""Interpolation, adaptive averages and `Tensor.unfold`, as torch computes them and in the graph.

torch_xla 2.8 ignores a scale that is not the quotient of the sizes: at `scale_factor=1.7`, which
makes 15 pixels of 9, it computes what `size=15` would be. On a CPU the gradients of all
interpolation leave the compiler, and so do adaptive averages with unequal windows and unfolding.
Here each axis is resampled by itself: by a matrix of weights where values are mixed, and by
selecting where the nearest is taken.
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
    """Register these kernels for XLA's device in this process."""
    kernels_by_name: dict[str, Callable[..., torch.Tensor]] = {
        **{
            name: _interpolation(*arguments)
            for name, arguments in resampling.INTERPOLATIONS.items()
        },
        **{name: _nearest(*arguments) for name, arguments in resampling.NEAREST.items()},
        "_adaptive_avg_pool2d": _adaptive_average(functional.avg_pool2d),
        "_adaptive_avg_pool3d": _adaptive_average(functional.avg_pool3d),
    }
    # Under both keys, for `torch.inference_mode` skips AutogradXLA.
    registration.replace(kernels_by_name, "AutogradXLA", "XLA")
    # The functionalized forms of a view.
    registration.replace({"unfold_copy": _unfold, "unfold_backward": _fold}, "XLA")


def _resample(values: torch.Tensor, matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Multiply each of the last axes by its matrix (output, input)."""
    result = values.float() if values.dtype in half_ops.HALF_DTYPES else values
    with torch.autocast("xla", enabled=False):
        for axis, matrix in enumerate(matrices, values.dim() - len(matrices)):
            result = torch.tensordot(result, matrix.to(result.dtype), ([axis], [1])).movedim(
                -1, axis
            )
            result = result.clone()  # see `registration.replace`; XLA makes none
    return result.to(values.dtype)


def _interpolation(matrix_of: MatrixBuilder, num_axes: int) -> Callable[..., torch.Tensor]:
    def kernel(
        values: torch.Tensor, output_shape: Sequence[int], align_corners: bool, *scales: Scale
    ) -> torch.Tensor:
        _check_num_dims(values, num_axes)
        input_shape = values.shape[-num_axes:]
        axes = zip(input_shape, output_shape, scales or [None] * num_axes, strict=True)
        return _resample(values, [
            registration.constant(values.device, matrix_of, size, output, align_corners, scale)
            for size, output, scale in axes
        ])  # fmt: skip

    return kernel


def _nearest(offset: float, num_axes: int) -> Callable[..., torch.Tensor]:
    def kernel(values: torch.Tensor, output_shape: Sequence[int], *scales: Scale) -> torch.Tensor:
        _check_num_dims(values, num_axes)
        axes = zip(output_shape, scales or [None] * num_axes, strict=True)
        for axis, (output, scale) in enumerate(axes, values.dim() - num_axes):
            values = _select_nearest(values, axis, output, scale, offset)
        return values.clone()  # see `registration.replace`

    return kernel


def _select_nearest(
    values: torch.Tensor, axis: int, output: int, scale: Scale, offset: float
) -> torch.Tensor:
    size = values.shape[axis]
    indices = resampling.nearest(size, output, scale, offset)
    repeats = output // size
    if repeats and np.array_equal(indices, np.arange(size).repeat(repeats)):
        # Expanded, for the gradient is one sum then, and not one addition after the other.
        shape = [*values.shape[: axis + 1], repeats, *values.shape[axis + 1 :]]
        return values.unsqueeze(axis + 1).expand(shape).flatten(axis, axis + 1)
    indices_on_device = registration.constant(
        values.device, resampling.nearest, size, output, scale, offset
    )
    return values.index_select(axis, indices_on_device)


def _adaptive_average(pool: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def kernel(values: torch.Tensor, output_shape: Sequence[int]) -> torch.Tensor:
        num_axes = len(output_shape)
        input_shape = values.shape[-num_axes:]
        if all(
            output and size % output == 0
            for size, output in zip(input_shape, output_shape, strict=True)
        ):
            return pool(
                values,
                [size // output for size, output in zip(input_shape, output_shape, strict=True)],
            )
        return _resample(values, [
            registration.constant(values.device, resampling.adaptive_average, size, output)
            for size, output in zip(input_shape, output_shape, strict=True)
        ])  # fmt: skip

    return kernel


def _check_num_dims(values: torch.Tensor, num_axes: int) -> None:
    if values.dim() != num_axes + 2:
        raise RuntimeError(
            f"It is expected input_size equals to {num_axes + 2}, but got size {values.dim()}"
        )


def _unfold(tensor: torch.Tensor, dimension: int, size: int, step: int) -> torch.Tensor:
    shape = torch.empty_like(tensor, device="meta").unfold(dimension, size, step).shape  # or error
    if not tensor.dim():
        return tensor.reshape(shape)
    axis = dimension % tensor.dim()
    indices = registration.constant(tensor.device, _window_indices, shape[axis], size, step)
    windows = tensor.index_select(axis, indices).unflatten(axis, (-1, size)).movedim(axis + 1, -1)
    return windows.clone()  # see `registration.replace`


def _fold(
    gradient: torch.Tensor, shape: Sequence[int], dimension: int, size: int, step: int
) -> torch.Tensor:
    zeros = gradient.new_zeros(shape)
    if not zeros.dim():
        return gradient.reshape(shape)
    axis = dimension % len(shape)
    indices = registration.constant(
        gradient.device, _window_indices, gradient.shape[axis], size, step
    )
    return zeros.index_add(axis, indices, gradient.movedim(-1, axis + 1).flatten(axis, axis + 1))


def _window_indices(num_windows: int, size: int, step: int) -> np.ndarray:
    return (np.arange(num_windows)[:, None] * step + np.arange(size)).flatten()
