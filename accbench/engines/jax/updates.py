"""What a step does with gradients before the optimizer, in JAX: the loss scale, clipping.

Formulas and their order are those of `torch._amp_update_scale_` and
`torch.nn.utils.clip_grad_norm_`.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

Array = Any
# Elements that are searched for overflows together.
_ROW = 1024


def nonfinite(gradients: list[Array]) -> Array:
    """Whether there is a NaN or an infinity in any of them; bool, ().

    Looked for in all gradients together, in rows of equal length: a GPU launches a kernel or two
    for each search.
    """
    parts: dict[Any, list[Array]] = {}
    for gradient in gradients:
        # A convolution's come with its channels last on a GPU.
        flat = (jnp.moveaxis(gradient, 1, -1) if gradient.ndim > 2 else gradient).ravel()
        whole = flat.size % _ROW == 0
        parts.setdefault((flat.dtype, whole), []).append(flat.reshape(-1, _ROW) if whole else flat)
    good = []
    for (_, whole), alike in parts.items():
        finite = jnp.isfinite(jnp.concatenate(alike))
        good.append(finite.all(1) if whole else finite)
    # The least of numbers, for XLA would make one search of two of a kind, and cut that in two.
    return jnp.concatenate(good).astype(jnp.float32).min() == 0


def all_there(gradients: list[Array]) -> list[Array]:
    """The gradients, none of which is known before all are.

    XLA else computes an update in one kernel with the cast of the old weight that the backward
    pass has yet to read, and this then waits for the gradient's reduction.
    """
    first = jnp.stack(
        [gradient[(0,) * gradient.ndim].astype(jnp.float32) for gradient in gradients]
    )
    bits = lax.bitcast_convert_type(first.sum(), jnp.uint32)
    zero = (bits >> 31) >> 1  # in a way that XLA does not see through
    return [gradient + zero.astype(gradient.dtype) for gradient in gradients]


def clipped(
    gradients: list[Array], max_norm: float, whole: Callable[[Array], Array]
) -> list[Array]:
    """Gradients whose norm, of all together, is `max_norm` at most.

    Args:
        whole: from their sums of squares, (n,) float32, where each may be a part, to whole ones'.
    """
    squares = jnp.stack([jnp.sum(jnp.square(g.astype(jnp.float32))) for g in gradients])
    norms = jnp.sqrt(whole(squares))
    norm = jnp.sqrt(jnp.sum(jnp.square(norms)))
    factor = jnp.minimum(max_norm / (norm + 1e-6), 1.0)
    return [(gradient * factor).astype(gradient.dtype) for gradient in gradients]


def next_scale(
    scale: Array, tracker: Array, overflow: Array, growth: float, backoff: float, interval: int
) -> tuple[Array, Array]:
    """The loss scale and its count of steps without overflow, after a step."""
    grows = ~overflow & (tracker + 1 == interval)
    grown = scale * growth
    grown = jnp.where(jnp.isfinite(grown), grown, scale)
    new_scale = jnp.where(overflow, scale * backoff, jnp.where(grows, grown, scale))
    new_tracker = jnp.where(overflow | grows, 0, tracker + 1)
    return new_scale.astype(scale.dtype), new_tracker.astype(tracker.dtype)
