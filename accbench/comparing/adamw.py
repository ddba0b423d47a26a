"""AdamW once more, on the host in float64: what an optimizer step should have done.

The formula is that of `torch.optim.AdamW` (Loshchilov and Hutter, Decoupled Weight Decay
Regularization, 2017), with torch's defaults for what a task does not set.
"""

import dataclasses
import math

import torch

from accbench.engines.state import Tensors

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


@dataclasses.dataclass(frozen=True)
class AdamW:
    """Hyperparameters."""

    lr: float
    weight_decay: float

    def step(
        self, parameter: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor,
        gradient: torch.Tensor, num_steps: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """The three tensors after the `num_steps`th step (from 1), in float64."""
        p, m, v, g = (t.double() for t in (parameter, exp_avg, exp_avg_sq, gradient))
        m = BETA1 * m + (1 - BETA1) * g
        v = BETA2 * v + (1 - BETA2) * g.square()
        m_hat_factor = 1 / (1 - BETA1**num_steps)
        root = v.sqrt() / math.sqrt(1 - BETA2**num_steps) + EPSILON
        p = p * (1 - self.lr * self.weight_decay) - self.lr * m_hat_factor * m / root
        return p, m, v

    @staticmethod
    def gradient(exp_avg: torch.Tensor, exp_avg_before: torch.Tensor) -> torch.Tensor:
        """What the optimizer used, from its first moment after and before: float64.

        It is averaged and unscaled, wherever an engine does those.
        """
        return (exp_avg.double() - BETA1 * exp_avg_before.double()) / (1 - BETA1)


@dataclasses.dataclass(frozen=True)
class Weights:
    """Parameters and moments in float32, as engines keep them."""

    parameters: Tensors
    exp_avg: Tensors
    exp_avg_sq: Tensors
    num_steps: dict[str, int]
    """Steps that moved a parameter: those in which it had a gradient."""

    @staticmethod
    def start(parameters: Tensors) -> "Weights":
        """Before the first step."""
        zeros = {name: torch.zeros_like(tensor) for name, tensor in parameters.items()}
        return Weights(parameters, zeros, dict(zeros), dict.fromkeys(parameters, 0))

    def after(self, rule: AdamW, gradients: Tensors) -> "Weights":
        """One step further; a parameter without a gradient stays as it is.

        Rounded to float32 again, so that an engine can be given just this. The same bits
        in every process of a machine: the reference keeps gradients alone.
        """
        parameters, exp_avg, exp_avg_sq = (
            dict(d) for d in (self.parameters, self.exp_avg, self.exp_avg_sq)
        )
        num_steps = dict(self.num_steps)
        for name, gradient in gradients.items():
            num_steps[name] += 1
            moved = rule.step(
                parameters[name], exp_avg[name], exp_avg_sq[name], gradient, num_steps[name]
            )
            parameters[name], exp_avg[name], exp_avg_sq[name] = (t.float() for t in moved)
        return Weights(parameters, exp_avg, exp_avg_sq, num_steps)
