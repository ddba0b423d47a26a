"""Reference optimizers in float64 on the host, which engines' updates are checked against.

The formulas are those of `torch.optim.AdamW` (Loshchilov and Hutter, Decoupled Weight Decay
Regularization, 2017) and `torch.optim.SGD` (Sutskever et al., On the importance of
initialization and momentum in deep learning, 2013), with torch's defaults for the settings that a
task does not have.
"""

import abc
import dataclasses
import math
from typing import ClassVar

import torch

from accbench.comparing import pieces
from accbench.config import TaskConfig
from accbench.distributed import complex_numbers
from accbench.engines import optimizers
from accbench.engines.common import optimizer_state
from accbench.engines.common.training_state import Tensors
from accbench.errors import RequestError

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


@dataclasses.dataclass(frozen=True)
class Rule(abc.ABC):
    """The update formula of a task's optimizer, with its hyperparameters."""

    task: TaskConfig

    moment_key: ClassVar[str]
    """Key of the state that the gradient of a step can be read from."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of a parameter's optimizer state, each a tensor of the parameter's shape."""
        average = (optimizer_state.AVERAGE,) if self.task.ema_decay else ()
        return (*optimizers.of_task(self.task).state_keys, *average)

    def step(
        self, parameter: torch.Tensor, state: Tensors, gradient: torch.Tensor, num_steps: int
    ) -> tuple[torch.Tensor, Tensors]:
        """Compute a parameter and its state after the `num_steps`th step (from 1) in float64.

        Returns:
            Both rounded to float32, or to complex64 of a complex parameter.
        """
        decay = self.decay(parameter)
        single = torch.complex64 if parameter.is_complex() else torch.float32
        moved = torch.empty(parameter.shape, dtype=single)
        after = {key: torch.empty_like(moved) for key in state}
        results = [pieces.flat(tensor) for tensor in (moved, *after.values())]
        start = 0
        for p, g, *values in pieces.in_float64([parameter, gradient, *state.values()]):
            before = dict(zip(state, values, strict=True))
            p_after, state_after = self.step_piece(p, before, g, num_steps, decay)
            for result, piece in zip(
                results, [p_after, *(state_after[key] for key in state)], strict=True
            ):
                result[start : start + len(p)] = piece
            start += len(p)
        return moved, after

    def step_piece(
        self, p: torch.Tensor, state: Tensors, g: torch.Tensor, num_steps: int, decay: float
    ) -> tuple[torch.Tensor, Tensors]:
        """Compute a piece of a parameter, (N,) in float64, and of its state after a step.

        Complex numbers are pairs of reals, as torch's optimizers treat them.
        """
        moved, after = self._step(p, state, g, num_steps, decay)
        if self.task.ema_decay:
            average = state[optimizer_state.AVERAGE]
            after[optimizer_state.AVERAGE] = average + (1 - self.task.ema_decay) * (moved - average)
        return moved, after

    @abc.abstractmethod
    def _step(
        self, p: torch.Tensor, state: Tensors, g: torch.Tensor, num_steps: int, decay: float
    ) -> tuple[torch.Tensor, Tensors]: ...

    def gradient(self, after: Tensors, before: Tensors, parameter: torch.Tensor) -> torch.Tensor:
        """Compute the gradient that an optimizer used, from its state before and after a step.

        The gradient is averaged over workers, unscaled and clipped, wherever an engine does that.

        Args:
            after: the parameter's optimizer state after the step.
            before: its state before the step.
            parameter: the parameter before the step.

        Returns:
            float64; (..., 2) for complex numbers.
        """
        key, wide = self.moment_key, complex_numbers.wide
        return self.gradient_piece(
            wide(after[key]), wide(before[key]), wide(parameter), self.decay(parameter)
        )

    @abc.abstractmethod
    def gradient_piece(
        self, after: torch.Tensor, before: torch.Tensor, p: torch.Tensor, decay: float
    ) -> torch.Tensor:
        """Compute a piece of the gradient from the moment `moment_key`, all (N,) in float64."""

    def decay(self, parameter: torch.Tensor) -> float:
        """Return the weight decay of a parameter."""
        return self.task.weight_decay if optimizer_state.decays(self.task, parameter) else 0.0


class AdamWRule(Rule):
    """AdamW: decoupled weight decay and two moments."""

    moment_key = "exp_avg"

    def _step(
        self, p: torch.Tensor, state: Tensors, g: torch.Tensor, num_steps: int, decay: float
    ) -> tuple[torch.Tensor, Tensors]:
        lr = self.task.lr
        # In few operations and in place: each one reads and writes the whole piece.
        m = torch.lerp(state["exp_avg"], g, 1 - BETA1)
        v = (BETA2 * state["exp_avg_sq"]).addcmul_(g, g, value=1 - BETA2)
        m_correction, v_correction = 1 - BETA1**num_steps, math.sqrt(1 - BETA2**num_steps)
        # m_hat / (sqrt(v_hat) + epsilon), multiplied by v_correction above and below the line.
        root = v.sqrt().add_(EPSILON * v_correction)
        factor = -lr * v_correction / m_correction
        moved = (p * (1 - lr * decay)).addcdiv_(m, root, value=factor)
        return moved, {"exp_avg": m, "exp_avg_sq": v}

    def gradient_piece(
        self, after: torch.Tensor, before: torch.Tensor, p: torch.Tensor, decay: float
    ) -> torch.Tensor:
        return (after - BETA1 * before) / (1 - BETA1)


class SGDRule(Rule):
    """SGD: an L2 penalty in the gradient, and momentum without dampening, optionally Nesterov's."""

    moment_key = "momentum_buffer"

    def _step(
        self, p: torch.Tensor, state: Tensors, g: torch.Tensor, num_steps: int, decay: float
    ) -> tuple[torch.Tensor, Tensors]:
        g = g + decay * p
        buffer = self.task.momentum * state["momentum_buffer"] + g
        direction = g + self.task.momentum * buffer if self.task.nesterov else buffer
        return p - self.task.lr * direction, {"momentum_buffer": buffer}

    def gradient_piece(
        self, after: torch.Tensor, before: torch.Tensor, p: torch.Tensor, decay: float
    ) -> torch.Tensor:
        return after - self.task.momentum * before - decay * p


RULES: dict[str, type[Rule]] = {"adamw": AdamWRule, "sgd": SGDRule}


def of_task(task: TaskConfig) -> Rule:
    """Return the rule of the task's optimizer.

    Raises:
        RequestError: there is no rule for it.
    """
    check(task.optimizer)
    return RULES[task.optimizer](task)


def check(optimizer: str) -> None:
    """Check that an optimizer has a rule.

    Raises:
        RequestError: there is no rule for it.
    """
    if optimizer not in RULES:
        raise RequestError(
            f"--optimizer {optimizer} has no float64 rule in accbench/comparing/update_rules.py, "
            f"so its updates cannot be checked as those of {' and '.join(RULES)} are: add "
            "--numerics_steps 0"
        )


@dataclasses.dataclass(frozen=True)
class Weights:
    """Parameters and optimizer state in float32, the types in which engines keep them."""

    parameters: Tensors
    state: dict[str, Tensors]
    """Parameter -> key -> tensor."""
    num_steps: dict[str, int]
    """Steps that moved a parameter: those in which it had a gradient."""

    @staticmethod
    def start(parameters: Tensors, rule: Rule) -> "Weights":
        """Return the weights before the first step, with the optimizer's initial state."""
        state = {
            name: {
                key: tensor if key == optimizer_state.AVERAGE else torch.zeros_like(tensor)
                for key in rule.keys
            }
            for name, tensor in parameters.items()
        }
        return Weights(parameters, state, dict.fromkeys(parameters, 0))

    def after(self, rule: Rule, gradients: Tensors) -> "Weights":
        """Compute the weights after one more step; parameters without a gradient stay as they are.

        The result is rounded to float32, so that an engine can load exactly this state. Every
        process of a machine computes the same bits: the reference stores only gradients.
        """
        parameters, state, num_steps = dict(self.parameters), dict(self.state), dict(self.num_steps)
        for name, gradient in gradients.items():
            num_steps[name] += 1
            parameters[name], state[name] = rule.step(
                parameters[name], state[name], gradient, num_steps[name]
            )
        return Weights(parameters, state, num_steps)
