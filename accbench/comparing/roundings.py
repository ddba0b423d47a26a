"""Perturbations as large as rounding, which measure the rounding noise of a step.

How much rounding changes a step depends on the step: BatchNorm over a few values amplifies it,
and a value near a ReLU's zero makes a gradient jump. So a step is repeated from weights that
are off by a few roundings. In float32, norms also compute their variance with the error of
E[x^2] - E[x]^2, which is how XLA computes it: where a channel's mean is far larger than its
spread, that error exceeds all other rounding.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from accbench.engines.common.training_state import Tensors

NUM_DRAWS = 2
"""Repetitions of each checked step in each pass of plain ddp. The evaluation, which is a single
number, is repeated twice as often."""
TIMES = 4.0
"""Size of a perturbation in roundings of float32: large enough to reach the jumps that other
programs, a few roundings away, meet."""
_FLOAT32 = 2.0**-24
# Enough to change how 16-bit values round afterwards, and small compared with that rounding.
_OF_16_BIT = {torch.bfloat16: 2.0**-13, torch.float16: 2.0**-16}


def perturbed(tensors: Tensors, dtype: torch.dtype | None, seed: int) -> Tensors:
    """Change each value at random by at most a few roundings, in the same way on all ranks.

    Args:
        tensors: name -> tensor.
        dtype: autocast's type; None without autocast.
        seed: seed of the random changes.
    """
    size = TIMES * _FLOAT32 if dtype is None else _OF_16_BIT[dtype]
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor * torch.rand(tensor.shape, generator=generator).mul_(2 * size).add_(1 - size)
        for name, tensor in tensors.items()
    }


def _normalized(
    x: torch.Tensor, dims: list[int], eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `x` normalized over `dims`, its mean and its variance."""
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    variance = centred.square().mean(dims, keepdim=True)
    with torch.no_grad():
        error = x.square().mean(dims, keepdim=True) - mean.square() - variance
        error = (variance + TIMES * error).clamp(min=0) - variance
    variance = variance + error
    return centred * torch.rsqrt(variance + eps), mean, variance


def _scaled(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _batch_norm(
    input: torch.Tensor, running_mean: torch.Tensor | None, running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> torch.Tensor:  # fmt: skip
    if not training:
        return _BATCH_NORM(input, running_mean, running_var, weight, bias, training, momentum, eps)
    x, mean, variance = _normalized(input, [0, *range(2, input.dim())], eps)
    if running_mean is not None and running_var is not None:
        num_values = input.numel() // input.shape[1]
        unbiased = variance.detach() * num_values / max(num_values - 1, 1)
        running_mean.lerp_(mean.detach().flatten(), momentum)
        running_var.lerp_(unbiased.flatten(), momentum)
    shape = (1, -1, *(1 for _ in input.shape[2:]))
    of_channels = [None if t is None else t.view(shape) for t in (weight, bias)]
    return _scaled(x, *of_channels)


def _layer_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, eps: float = 1e-5,
) -> torch.Tensor:  # fmt: skip
    x, _, _ = _normalized(input, [*range(-len(normalized_shape), 0)], eps)
    return _scaled(x, weight, bias)


def _group_norm(
    input: torch.Tensor, num_groups: int, weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, eps: float = 1e-5,
) -> torch.Tensor:  # fmt: skip
    groups = input.reshape(input.shape[0], num_groups, -1)
    x = _normalized(groups, [2], eps)[0].view(input.shape)
    shape = (1, -1, *(1 for _ in input.shape[2:]))
    return _scaled(x, *(None if t is None else t.view(shape) for t in (weight, bias)))


_BATCH_NORM = functional.batch_norm
_NORMS = {"batch_norm": _batch_norm, "layer_norm": _layer_norm, "group_norm": _group_norm}


@contextlib.contextmanager
def norms_with_xla_variance(dtype: torch.dtype | None) -> Iterator[None]:
    """Replace torch's float32 norms by those with XLA's variance; do nothing under autocast."""
    if dtype is not None:
        yield
        return
    originals: dict[str, Any] = {name: getattr(functional, name) for name in _NORMS}
    try:
        for name, function in _NORMS.items():
            setattr(functional, name, function)
        yield
    finally:
        for name, function in originals.items():
            setattr(functional, name, function)
