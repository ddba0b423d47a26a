"""What a step does with gradients, in JAX: torch's AdamW and SGD, the loss scale, clipping.

Formulas and their order are those of `torch.optim._single_tensor_adamw` and
`_single_tensor_sgd`, of `torch._amp_update_scale_` and `torch.nn.utils.clip_grad_norm_`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from accbench.engines.jax.lowering.torch_calls import torch_call

Array = Any
# Elements that are searched for overflows together.
_ROW = 1024


@dataclasses.dataclass(frozen=True)
class Rates:
    """What may change from step to step in a group of parameters, float32, ()."""

    lr: Array
    kept: Array
    """What decay leaves of a weight: 1 - lr * weight_decay."""


def adamw(
    settings: dict[str, Any], rates: Rates, parameter: Array, gradient: Array,
    state: dict[str, Array], step: Array,
) -> tuple[Array, dict[str, Array]]:  # fmt: skip
    """A parameter and its moments after a step, the `step`th of this parameter from 1."""
    beta1, beta2 = settings["betas"]
    mean = state["exp_avg"] + (1 - beta1) * (gradient - state["exp_avg"])
    square = beta2 * state["exp_avg_sq"] + (1 - beta2) * gradient * gradient
    # 1 - beta**step, which in float32 would lose its first digits.
    correction1 = -jnp.expm1(step * np.float32(np.log(beta1)))
    correction2 = -jnp.expm1(step * np.float32(np.log(beta2)))
    root = jnp.sqrt(square) / jnp.sqrt(correction2) + settings["eps"]
    moved = parameter * rates.kept - (rates.lr / correction1) * (mean / root)
    return moved, {"exp_avg": mean, "exp_avg_sq": square}


@torch_call
def _adamw_in_place(
    read: list[torch.Tensor], write: list[torch.Tensor], places: list[int], settings: Any
) -> None:
    num = len(places)
    parameters, means, squares = write[:num], write[num : 2 * num], write[2 * num :]
    *gradients, lr, counts = read[3 * num :]
    steps = counts.unbind()
    torch._fused_adamw_(
        parameters, gradients, means, squares, [], [steps[place] for place in places], lr=lr,
        amsgrad=False, maximize=False, **settings,
    )  # fmt: skip


def adamw_by_torch(
    settings: dict[str, Any], lr: Array, parameters: list[Array], gradients: list[Array],
    states: list[dict[str, Array]], counts: Array, places: list[int],
) -> list[tuple[Array, dict[str, Array]]]:  # fmt: skip
    """As `adamw` of each of a group's parameters, all float32, by torch's own kernel on a CPU.

    Args:
        counts: (parameters of the model,) float32, of steps with this one.
        places: the parameters' among those.
    """
    beta1, beta2 = settings["betas"]
    how = {"beta1": beta1, "beta2": beta2, "weight_decay": settings["weight_decay"]}
    changed = [*parameters, *(s["exp_avg"] for s in states), *(s["exp_avg_sq"] for s in states)]
    results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in changed]
    moved = _adamw_in_place(
        results, *changed, *gradients, lr, counts, in_place=len(changed), places=places,
        settings=how | {"eps": settings["eps"]},
    )  # fmt: skip
    num = len(parameters)
    of_each = zip(moved[:num], moved[num : 2 * num], moved[2 * num :], strict=True)
    return [(p, {"exp_avg": mean, "exp_avg_sq": square}) for p, mean, square in of_each]


def sgd(
    settings: dict[str, Any], rates: Rates, parameter: Array, gradient: Array,
    state: dict[str, Array], step: Array,
) -> tuple[Array, dict[str, Array]]:  # fmt: skip
    """Likewise, of stochastic gradient descent with momentum and without dampening."""
    if settings["weight_decay"]:
        gradient = gradient + settings["weight_decay"] * parameter
    if not settings["momentum"]:
        return parameter - rates.lr * gradient, state
    buffer = settings["momentum"] * state["momentum_buffer"] + gradient
    way = gradient + settings["momentum"] * buffer if settings["nesterov"] else buffer
    return parameter - rates.lr * way, {"momentum_buffer": buffer}


RULES = {"adamw": adamw, "sgd": sgd}


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
