"""Max-pooling whose windows have gaps (`dilation`).

torch_xla 2.8 computes its gradient as if they had none, and ends the process where the sizes do not
fit then. Here the values of all windows are laid side by side, which takes memory, and the gradient
goes where the indices say. Windows without gaps remain torch_xla's.
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
    """For all that is computed on XLA's device in this process."""
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


def _pool(own: Any) -> Callable[..., Pair]:
    def kernel(
        given: torch.Tensor, size: Sequence[int], stride: Sequence[int] = (),
        padding: Sequence[int] = (0,), dilation: Sequence[int] = (1,), ceil_mode: bool = False,
    ) -> Pair:  # fmt: skip
        if set(dilation) == {1}:
            out, indices = given.new_empty(0), given.new_empty(0, dtype=torch.int64)
            own.out(given, size, stride, padding, dilation, ceil_mode, out=out, indices=indices)
            return out, indices
        shape = own(
            torch.empty_like(given, device="meta"), size, stride, padding, dilation, ceil_mode
        )[0].shape
        rank = _rank(own)
        each = (size, stride or size, padding, dilation)
        of_axes = [tuple(values) * (rank // len(values)) for values in each]
        table = registration.constant(
            given.device, _table, given.shape[-rank:], shape[-rank:], *of_axes
        )
        lead = given.shape[:-rank]
        seen = given.flatten(-rank).index_select(-1, table.clamp(min=0).flatten())
        seen = seen.view(*lead, *table.shape)
        most, place = torch.where(table < 0, -torch.inf, seen).max(-1)
        indices = table.expand(*lead, *table.shape).gather(-1, place.unsqueeze(-1))
        return most.view(shape).clone(), indices.view(shape).clone()  # see `kernels.replace`

    return kernel


def _rank(own: Any) -> int:
    return 3 if "3d" in own.__name__ else 2


def _table(
    old: tuple[int, ...], new: tuple[int, ...], size: tuple[int, ...], stride: tuple[int, ...],
    padding: tuple[int, ...], dilation: tuple[int, ...],
) -> np.ndarray:  # fmt: skip
    """(windows, places in each): where each stands in the flat input; -1 if in the padding."""
    flat, outside = np.zeros((1, 1), np.int64), np.zeros((1, 1), bool)
    for axis, length in enumerate(old):
        starts = np.arange(new[axis]) * stride[axis] - padding[axis]
        places = starts[:, None] + np.arange(size[axis]) * dilation[axis]
        out = (places < 0) | (places >= length)
        flat = _crossed(flat * length, places, np.add)
        outside = _crossed(outside, out, np.logical_or)
    return np.where(outside, -1, flat)


def _crossed(first: np.ndarray, second: np.ndarray, by: np.ufunc) -> np.ndarray:
    """(a, b) and (c, d) -> (a * c, b * d)."""
    both: np.ndarray = by(first[:, None, :, None], second[None, :, None, :])
    return both.reshape(len(first) * len(second), -1)


def _backward(own: Any) -> Callable[..., torch.Tensor]:
    def kernel(
        gradient: torch.Tensor, given: torch.Tensor, size: Sequence[int], stride: Sequence[int],
        padding: Sequence[int], dilation: Sequence[int], ceil_mode: bool, indices: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        if set(dilation) == {1}:
            out = given.new_empty(0)
            own.grad_input(
                gradient, given, size, stride, padding, dilation, ceil_mode, indices,
                grad_input=out,
            )  # fmt: skip
            return out
        rank = _rank(own)
        zeros = torch.zeros_like(given).flatten(-rank)
        added = zeros.scatter_add(-1, indices.flatten(-rank), gradient.flatten(-rank))
        return added.view(given.shape).clone()

    return kernel
