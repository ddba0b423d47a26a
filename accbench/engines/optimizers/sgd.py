"""`--optimizer sgd`: an L2 penalty in the gradient, momentum without dampening.

Sutskever et al., On the importance of initialization and momentum in deep learning, 2013. The
formula and its order are those of `torch.optim.sgd._single_tensor_sgd`.
"""

from typing import Any

import torch

from accbench.config import TaskConfig
from accbench.engines import optimizers
from accbench.engines.optimizers import Array


class Optimizer(optimizers.Optimizer):
    """Stochastic gradient descent, with Nesterov's momentum as an option."""

    torch_class = torch.optim.SGD
    has_fused = True
    state_keys = ("momentum_buffer",)
    counts_steps = False

    @classmethod
    def arguments(cls, task: TaskConfig) -> dict[str, Any]:
        return {
            **super().arguments(task),
            "momentum": task.momentum,
            "nesterov": task.nesterov,
        }

    @classmethod
    def update(
        cls, math: Any, settings: dict[str, Any], lr: Array, parameter: Array, gradient: Array,
        state: dict[str, Array], step: Array,
    ) -> tuple[Array, dict[str, Array]]:  # fmt: skip
        if settings["weight_decay"]:
            gradient = gradient + settings["weight_decay"] * parameter
        momentum = settings["momentum"]
        if not momentum:
            return parameter - lr * gradient, state
        buffer = momentum * state["momentum_buffer"] + gradient
        direction = gradient + momentum * buffer if settings["nesterov"] else buffer
        return parameter - lr * direction, {"momentum_buffer": buffer}

    @classmethod
    def xla_class(cls) -> type[torch.optim.Optimizer]:
        from torch_xla.amp import syncfree

        sgd: type[torch.optim.Optimizer] = syncfree.SGD
        return sgd
