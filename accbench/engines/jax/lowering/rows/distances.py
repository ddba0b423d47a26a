"""Distances between vectors, and their gradients."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from accbench.engines.jax.lowering.dtypes import opmath
from accbench.engines.jax.lowering.table import lowering


def _norm(difference: Any, p: float) -> Any:
    x = jnp.abs(difference)
    if p == 0:
        return jnp.sum(x != 0, -1, x.dtype)
    if p == math.inf:
        return jnp.max(x, -1, initial=0)
    if p == 2:
        return jnp.sqrt(jnp.sum(jnp.square(x), -1))
    return jnp.sum(x if p == 1 else x**p, -1) ** (1 / p)


def _slope(difference: Any, p: float, norm: Any) -> Any:
    """Return the norm's gradient with respect to the difference; 0 where vectors are equal."""
    norm = norm[..., None]
    x, sign = jnp.abs(difference), jnp.sign(difference)
    if p == 0:
        return jnp.zeros_like(x)
    if p == 1:
        return sign
    if p == math.inf:
        return sign * (x == norm)
    safe = jnp.where(norm == 0, 1, norm)
    base = jnp.where(x == 0, 1, x) ** (p - 1) / safe ** (p - 1)
    return jnp.where((norm == 0) | (x == 0), 0, sign * base)


@lowering("aten._cdist_forward.default")
def cdist(x1: Any, x2: Any, p: float, compute_mode: int | None = None) -> Any:
    """Compute distances of x1 (..., M, width) and x2 (..., N, width) -> (..., M, N)."""
    return _norm(x1[..., :, None, :] - x2[..., None, :, :], p)


@lowering("aten._cdist_backward.default")
def cdist_backward(grad: Any, x1: Any, x2: Any, p: float, cdist: Any) -> Any:
    """Compute the gradient of x1."""
    slope = _slope(x1[..., :, None, :] - x2[..., None, :, :], p, cdist)
    gradient = jnp.sum(grad[..., None] * slope, -2)
    # Sum where x1 was broadcast over x2's batch.
    return jnp.sum(gradient, tuple(range(gradient.ndim - x1.ndim)))


@lowering("aten._euclidean_dist.default")
def euclidean_dist(x1: Any, x2: Any) -> Any:
    return cdist(x1, x2, 2)


@lowering("aten._pdist_forward.default")
def pdist(self: Any, p: float = 2) -> Any:
    """Compute the distances of all pairs of (N, width), the first vector's first."""
    i, j = np.triu_indices(self.shape[0], 1)
    return _norm(self[i] - self[j], p)


@lowering("aten._pdist_backward.default")
def pdist_backward(grad: Any, self: Any, p: float, pdist: Any) -> Any:
    i, j = np.triu_indices(self.shape[0], 1)
    pair_grads = grad[:, None] * _slope(self[i] - self[j], p, pdist)
    zeros = jnp.zeros(self.shape, opmath(self.dtype))
    return zeros.at[i].add(pair_grads).at[j].add(-pair_grads).astype(self.dtype)
