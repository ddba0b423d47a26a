"""The optimizer contract: one file an optimizer, found by its name.

`accbench/engines/optimizers/<name>.py` defines `class Optimizer(optimizers.Optimizer)`, which
`--optimizer <name>` then asks for, in every engine. torch's class, its arguments and one formula
are enough; faster forms of single engines are optional.
"""

import abc
from typing import Any, ClassVar

import torch

from accbench.config import TaskConfig, plugins

Array = Any
"""A tensor, or a JAX array."""


class Optimizer(abc.ABC):
    """One optimizer, as all engines use it."""

    torch_class: ClassVar[type[torch.optim.Optimizer]]
    """The class that engines ddp and inductor step with."""
    has_fused: ClassVar[bool] = False
    """Whether `torch_class` takes `fused=True`, and then skips a step by a tensor, `found_inf`."""
    state_keys: ClassVar[tuple[str, ...]]
    """Keys of the state of a parameter, each a tensor of the parameter's shape."""
    counts_steps: ClassVar[bool] = True
    """Whether `torch_class` counts its steps in `state["step"]`."""

    @classmethod
    def arguments(cls, task: TaskConfig) -> dict[str, Any]:
        """Return the arguments of `torch_class` that the task's flags ask for."""
        return {"lr": task.lr, "weight_decay": task.weight_decay}

    @classmethod
    @abc.abstractmethod
    def update(
        cls, math: Any, settings: dict[str, Any], lr: Array, parameter: Array, gradient: Array,
        state: dict[str, Array], step: Array,
    ) -> tuple[Array, dict[str, Array]]:  # fmt: skip
        """Return a parameter and its state after one step, computed as `torch_class` does.

        Engine jax runs it in its step; engine xla does, too, unless there is an `xla_class`.

        Args:
            math: the module `torch` or `jax.numpy`; use functions that both have.
            settings: the parameter's group, with all that does not change between steps.
            lr: the learning rate, float32, ().
            parameter: float, any shape.
            gradient: averaged, unscaled and clipped, of the parameter's shape.
            state: `state_keys` -> a tensor of the parameter's shape.
            step: how many steps the parameter has taken with this one, float32, ().
        """

    @classmethod
    def xla_class(cls) -> type[torch.optim.Optimizer] | None:
        """Return a class that steps on XLA's device without waiting; None takes `update`."""
        return None

    @classmethod
    def jax_group_update(cls) -> Any:
        """Return torch's own kernel for a group's float32 parameters on a CPU, or None.

        Its arguments are those of `accbench.engines.jax.torch_adamw.update_group`.
        """
        return None


def of_task(task: TaskConfig) -> type[Optimizer]:
    """Return the task's optimizer.

    Raises:
        RequestError: there is none of that name; the message lists the right ones.
    """
    optimizer: type[Optimizer] = plugins.load("optimizers", task.optimizer)
    return optimizer
