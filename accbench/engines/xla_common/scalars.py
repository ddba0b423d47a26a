"""Scalar tensors in the dtype and on the device of another tensor."""

import torch


def scalar_like(value: float, like: torch.Tensor) -> torch.Tensor:
    """Return a number as a tensor () with the dtype and device of `like`.

    Comparisons and `torch.where` take it in place of a Python number, for which torch_xla would
    compute in float64 or int64.
    """
    return torch.full((), value, dtype=like.dtype, device=like.device)
