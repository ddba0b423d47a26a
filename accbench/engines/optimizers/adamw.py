"""`--optimizer adamw`: decoupled weight decay, two moments.

Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2017. The formula and its order are
those of `torch.optim.adam._single_tensor_adam`.
"""

import math as host_math
from typing import Any

import torch

from accbench.engines import optimizers
from accbench.engines.optimizers import Array


class Optimizer(optimizers.Optimizer):
    """AdamW, fused in PyTorch and sync-free under XLA."""

    torch_class = torch.optim.AdamW
    has_fused = True
    state_keys = ("exp_avg", "exp_avg_sq")

    @classmethod
    def update(
        cls, math: Any, settings: dict[str, Any], lr: Array, parameter: Array, gradient: Array,
        state: dict[str, Array], step: Array,
    ) -> tuple[Array, dict[str, Array]]:  # fmt: skip
        beta1, beta2 = settings["betas"]
        moment1 = state["exp_avg"] + (1 - beta1) * (gradient - state["exp_avg"])
        moment2 = beta2 * state["exp_avg_sq"] + (1 - beta2) * gradient * gradient
        # 1 - beta**step; computed directly in float32 it would lose its first digits.
        correction1 = -math.expm1(step * host_math.log(beta1))
        correction2 = -math.expm1(step * host_math.log(beta2))
        denominator = math.sqrt(moment2) / math.sqrt(correction2) + settings["eps"]
        decayed = parameter * (1 - lr * settings["weight_decay"])
        updated = decayed - (lr / correction1) * (moment1 / denominator)
        return updated, {"exp_avg": moment1, "exp_avg_sq": moment2}

    @classmethod
    def xla_class(cls) -> type[torch.optim.Optimizer]:
        from accbench.engines.xla import sync_free

        return sync_free.SyncFreeAdamW

    @classmethod
    def jax_group_update(cls) -> Any:
        from accbench.engines.jax import torch_adamw

        return torch_adamw.update_group
