"""torch's fused AdamW on a CPU, called in place from XLA's program."""

from typing import Any

import jax
import torch

from accbench.engines.jax.lowering.torch_calls import torch_call

Array = Any


@torch_call
def _adamw_in_place(
    read: list[torch.Tensor], write: list[torch.Tensor], indices: list[int], settings: Any
) -> None:
    num = len(indices)
    parameters, means, squares = write[:num], write[num : 2 * num], write[2 * num :]
    *gradients, lr, counts = read[3 * num :]
    steps = counts.unbind()
    torch._fused_adamw_(
        parameters, gradients, means, squares, [], [steps[index] for index in indices], lr=lr,
        amsgrad=False, maximize=False, **settings,
    )  # fmt: skip


def update_group(
    settings: dict[str, Any], lr: Array, parameters: list[Array], gradients: list[Array],
    states: list[dict[str, Array]], counts: Array, indices: list[int],
) -> list[tuple[Array, dict[str, Array]]]:  # fmt: skip
    """Return each of a group's float32 parameters and its moments after a step.

    Args:
        settings: the group's.
        lr: float32, ().
        parameters: the group's.
        gradients: one for each parameter.
        states: `exp_avg` and `exp_avg_sq` of each parameter.
        counts: (parameters of the model,) float32, of steps including this one.
        indices: of the group's parameters in `counts`.
    """
    beta1, beta2 = settings["betas"]
    arguments = {"beta1": beta1, "beta2": beta2, "weight_decay": settings["weight_decay"]}
    changed = [*parameters, *(s["exp_avg"] for s in states), *(s["exp_avg_sq"] for s in states)]
    results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in changed]
    updated = _adamw_in_place(
        results, *changed, *gradients, lr, counts, in_place=len(changed), indices=indices,
        settings=arguments | {"eps": settings["eps"]},
    )  # fmt: skip
    num = len(parameters)
    triples = zip(updated[:num], updated[num : 2 * num], updated[2 * num :], strict=True)
    return [(p, {"exp_avg": mean, "exp_avg_sq": square}) for p, mean, square in triples]
