"""Max-pooling whose windows have gaps (`dilation`).

torch_xla 2.8 computes its gradient as if there were no gaps, and aborts the process where the sizes
do not fit then. Here the values of all windows are laid side by side, which takes memory, and the
gradient goes to the positions that the indices name. Windows without gaps stay torch_xla's.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from accbench.engines.xla.kernels import registration

Pair = tuple[torch.Tensor, torch.Tensor]

aten = torch.ops.aten


@cache
def replace_kernels() -> None:
    """Register these kernels for XLA's device in this process."""
    for name in ("max_pool2d", "max_pool3d"):
        with_indices = getattr(aten, f"{name}_with_indices")
        backward = getattr(aten, f"{name}_with_indices_backward")
        registration.replace({name: _without_indices(with_indices)}, "AutogradXLA")
        registration.replace(
            {
                f"{name}_with_indices": _pool(with_indices),
                f"{name}_with_indices_backward": _backward(backward),
            },
            "XLA",
        )


def _without_indices(with_indices: Any) -> Callable[..., torch.Tensor]:
    def kernel(*args: Any) -> torch.Tensor:
        out: torch.Tensor = with_indices(*args)[0]
        return out

    return kernel


def _pool(xla_kernel: Any) -> Callable[..., Pair]:
    def kernel(
        values: torch.Tensor, size: Sequence[int], stride: Sequence[int] = (),
        padding: Sequence[int] = (0,), dilation: Sequence[int] = (1,), ceil_mode: bool = False,
    ) -> Pair:  # fmt: skip
        if set(dilation) == {1}:
            out, indices = values.new_empty(0), values.new_empty(0, dtype=torch.int64)
            xla_kernel.out(
                values, size, stride, padding, dilation, ceil_mode, out=out, indices=indices
            )
            return out, indices
        shape = xla_kernel(
            torch.empty_like(values, device="meta"), size, stride, padding, dilation, ceil_mode
        )[0].shape
        rank = _num_spatial_dims(xla_kernel)
        arguments = (size, stride or size, padding, dilation)
        per_axis = [tuple(sizes) * (rank // len(sizes)) for sizes in arguments]
        table = registration.constant(
            values.device, _window_indices, values.shape[-rank:], shape[-rank:], *per_axis
        )
        batch_shape = values.shape[:-rank]
        candidates = values.flatten(-rank).index_select(-1, table.clamp(min=0).flatten())
        candidates = candidates.view(*batch_shape, *table.shape)
        maxima, winners = torch.where(table < 0, -torch.inf, candidates).max(-1)
        indices = table.expand(*batch_shape, *table.shape).gather(-1, winners.unsqueeze(-1))
        return maxima.view(shape).clone(), indices.view(shape).clone()  # see `registration.replace`

    return kernel


def _num_spatial_dims(xla_kernel: Any) -> int:
    return 3 if "3d" in xla_kernel.__name__ else 2


def _window_indices(
    input_shape: tuple[int, ...], output_shape: tuple[int, ...], size: tuple[int, ...],
    stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...],
) -> np.ndarray:  # fmt: skip
    """Return each window's indices in the flat input, (windows, size); -1 in the padding."""
    flat, outside = np.zeros((1, 1), np.int64), np.zeros((1, 1), bool)
    for axis, length in enumerate(input_shape):
        starts = np.arange(output_shape[axis]) * stride[axis] - padding[axis]
        positions = starts[:, None] + np.arange(size[axis]) * dilation[axis]
        is_outside = (positions < 0) | (positions >= length)
        flat = _cross(flat * length, positions, np.add)
        outside = _cross(outside, is_outside, np.logical_or)
    return np.where(outside, -1, flat)


def _cross(first: np.ndarray, second: np.ndarray, combine: np.ufunc) -> np.ndarray:
    """Combine each pair of rows and columns: (a, b) and (c, d) -> (a * c, b * d)."""
    both: np.ndarray = combine(first[:, None, :, None], second[None, :, None, :])
    return both.reshape(len(first) * len(second), -1)


def _backward(xla_kernel: Any) -> Callable[..., torch.Tensor]:
    def kernel(
        gradient: torch.Tensor, values: torch.Tensor, size: Sequence[int], stride: Sequence[int],
        padding: Sequence[int], dilation: Sequence[int], ceil_mode: bool, indices: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        if set(dilation) == {1}:
            out = values.new_empty(0)
            xla_kernel.grad_input(
                gradient, values, size, stride, padding, dilation, ceil_mode, indices,
                grad_input=out,
            )  # fmt: skip
            return out
        rank = _num_spatial_dims(xla_kernel)
        zeros = torch.zeros_like(values).flatten(-rank)
        grad_values = zeros.scatter_add(-1, indices.flatten(-rank), gradient.flatten(-rank))
        return grad_values.view(values.shape).clone()

    return kernel
