"""Numbers in the type of a tensor."""

import torch


def number(value: float, like: torch.Tensor) -> torch.Tensor:
    """A number in the type of what it is compared with or put in place of: () .

    torch_xla would compare in float64 or int64 with one of Python's.
    """
    return torch.full((), value, dtype=like.dtype, device=like.device)
