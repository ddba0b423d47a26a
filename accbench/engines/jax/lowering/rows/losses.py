"""Losses that are better whole than decomposed by torch.

The gradient of a class's likelihood is a comparison here, without scattering.
"""

from typing import Any

import jax
import jax.numpy as jnp

from accbench.engines.jax.lowering.dtypes import opmath
from accbench.engines.jax.lowering.table import lowering

MEAN, SUM = 1, 2


def _weights(target: Any, weight: Any, ignore_index: int, dtype: Any) -> tuple[Any, Any]:
    """Return valid classes, and the weight of each sample: 0 where it is ignored."""
    is_counted = target != ignore_index
    classes = jnp.where(is_counted, target, 0)
    class_weights = 1 if weight is None else jnp.take(weight.astype(dtype), classes, mode="clip")
    return classes, jnp.where(is_counted, jnp.asarray(class_weights, dtype), 0)


def _class_axis(self: Any) -> int:
    return 0 if self.ndim == 1 else 1


@lowering("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
def nll_loss(
    self: Any, target: Any, weight: Any, reduction: int, ignore_index: int
) -> tuple[Any, Any]:
    """Return the loss and the sum of weights; self (N, C, ...) or (C,), target (N, ...) or ()."""
    axis, dtype = _class_axis(self), opmath(self.dtype)
    classes, weights = _weights(target, weight, ignore_index, dtype)
    picked = jnp.take_along_axis(self, jnp.expand_dims(classes, axis), axis, mode="clip")
    losses = -jnp.squeeze(picked, axis).astype(dtype) * weights
    total = jnp.sum(weights)
    if reduction == MEAN:
        loss = jnp.sum(losses) / total
    elif reduction == SUM:
        loss = jnp.sum(losses)
    else:
        loss = jnp.where(weights == 0, 0, losses)
        return loss.astype(self.dtype), jnp.zeros((), self.dtype)
    return loss.astype(self.dtype), total.astype(self.dtype)


@lowering("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")
def nll_loss_backward(
    grad_output: Any,
    self: Any,
    target: Any,
    weight: Any,
    reduction: int,
    ignore_index: int,
    total_weight: Any,
) -> Any:
    axis, dtype = _class_axis(self), opmath(self.dtype)
    classes, weights = _weights(target, weight, ignore_index, dtype)
    g = grad_output.astype(dtype)
    g = g / total_weight.astype(dtype) if reduction == MEAN else g
    per_sample = jnp.where(weights == 0, 0, -(weights * g))
    numbers = jnp.arange(self.shape[axis]).reshape(-1, *[1] * (self.ndim - axis - 1))
    hit = jnp.expand_dims(classes, axis) == numbers
    return jnp.where(hit, jnp.expand_dims(per_sample, axis), 0).astype(self.dtype)


@lowering("aten.soft_margin_loss_backward.default")
def soft_margin_loss_backward(grad_output: Any, self: Any, target: Any, reduction: int) -> Any:
    """Compute the gradient without sigmoid(x) - 1.

    That would lose all digits where the loss is small.
    """
    dtype = opmath(self.dtype)
    g, x, t = (a.astype(dtype) for a in (grad_output, self, target))
    slope = -g * t * jax.nn.sigmoid(-t * x)
    return (slope / self.size if reduction == MEAN else slope).astype(self.dtype)
