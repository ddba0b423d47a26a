"""Gradients between the backward pass and the optimizer, in JAX: loss scale and clipping.

Formulas and their order are those of `torch._amp_update_scale_` and
`torch.nn.utils.clip_grad_norm_`.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

Array = Any
# Elements of a row, which is searched for overflows together.
_ROW = 1024


def any_nonfinite(gradients: list[Array]) -> Array:
    """Return whether any gradient holds a NaN or an infinity; bool, ().

    All gradients are searched together, in rows of equal length: a GPU launches a kernel or two
    for each search.
    """
    by_kind: dict[Any, list[Array]] = {}
    for gradient in gradients:
        # On a GPU a convolution's gradients come with their channels last.
        flat = (jnp.moveaxis(gradient, 1, -1) if gradient.ndim > 2 else gradient).ravel()
        fills_rows = flat.size % _ROW == 0
        by_kind.setdefault((flat.dtype, fills_rows), []).append(
            flat.reshape(-1, _ROW) if fills_rows else flat
        )
    finite_flags = []
    for (_, fills_rows), same_kind in by_kind.items():
        finite = jnp.isfinite(jnp.concatenate(same_kind))
        finite_flags.append(finite.all(1) if fills_rows else finite)
    # A minimum, for XLA would fuse two searches for flags into one, and cut that in two.
    return jnp.concatenate(finite_flags).astype(jnp.float32).min() == 0


def gradient_barrier(gradients: list[Array]) -> list[Array]:
    """Return the gradients so that none can be used before all are computed.

    Otherwise XLA computes an update in one kernel with the cast of the old weight that the
    backward pass has yet to read, and that pass then waits for the gradient's reduction.
    """
    first_elements = jnp.stack(
        [gradient[(0,) * gradient.ndim].astype(jnp.float32) for gradient in gradients]
    )
    bits = lax.bitcast_convert_type(first_elements.sum(), jnp.uint32)
    zero = (bits >> 31) >> 1  # which XLA does not simplify
    return [gradient + zero.astype(gradient.dtype) for gradient in gradients]


def clip_by_global_norm(
    gradients: list[Array], max_norm: float, sum_over_shards: Callable[[Array], Array]
) -> list[Array]:
    """Scale gradients so that their global norm is `max_norm` at most.

    Args:
        gradients: global arrays or this rank's shards of them.
        max_norm: of all gradients together.
        sum_over_shards: (n,) float32 sums of squares of what this rank has -> of global arrays.
    """
    squares = jnp.stack([jnp.sum(jnp.square(g.astype(jnp.float32))) for g in gradients])
    norms = jnp.sqrt(sum_over_shards(squares))
    norm = jnp.sqrt(jnp.sum(jnp.square(norms)))
    factor = jnp.minimum(max_norm / (norm + 1e-6), 1.0)
    return [(gradient * factor).astype(gradient.dtype) for gradient in gradients]


def next_loss_scale(
    scale: Array, tracker: Array, overflow: Array, growth: float, backoff: float, interval: int
) -> tuple[Array, Array]:
    """Compute the loss scale, and its count of steps without overflow, after a step."""
    grows = ~overflow & (tracker + 1 == interval)
    grown = scale * growth
    grown = jnp.where(jnp.isfinite(grown), grown, scale)
    new_scale = jnp.where(overflow, scale * backoff, jnp.where(grows, grown, scale))
    new_tracker = jnp.where(overflow | grows, 0, tracker + 1)
    return new_scale.astype(scale.dtype), new_tracker.astype(tracker.dtype)
