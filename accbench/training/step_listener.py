"""The contract of what follows a loop of a user's own, step by step, such as the numerics pass."""

import torch

from accbench.engines import Batch


class StepListener:
    """Listener for a run's steps; this class itself does nothing."""

    def before_step(self) -> None:
        """Handle the loop's request for the first batch of a step."""

    def got(self, batch: Batch) -> None:
        """Handle a training batch that has come to the device."""

    def after_step(self, loss: torch.Tensor, is_own: bool) -> None:
        """Handle a step that was handed to the device; its gradients still exist.

        Args:
            loss: the step's loss, on the device.
            is_own: whether the optimizer has stepped that `accbench.accelerate` was given.
        """
