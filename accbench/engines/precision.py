"""Mixed precision: the type of autocast, the loss scale, and steps whose gradients overflow."""

from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import OptState

from accbench.config import TaskConfig, amp_level
from accbench.distributed import complex_parameters
from accbench.distributed.whole_tensors import own_shard


class Precision:
    """The types that a task trains in.

    Args:
        task: `--amp_level` and `--amp_dtype` decide.
        scaler: a GradScaler or its like, where the type needs one.
    """

    found_inf: torch.Tensor
    """1 after a step with a gradient that is not finite, else 0; only with `--on_nan skip`."""

    def __init__(self, task: TaskConfig, scaler: Any = None) -> None:
        self.task, self.scaler = task, scaler
        is_mixed = amp_level(task) == "O1" and task.amp_dtype is not None
        self.autocast_dtype: torch.dtype | None = (
            getattr(torch, str(task.amp_dtype)) if is_mixed else None
        )

    @property
    def needs_loss_scale(self) -> bool:
        """Whether gradients of this type underflow without a loss scale."""
        return self.autocast_dtype is torch.float16

    @property
    def has_loss_scale(self) -> bool:
        """Whether gradients are scaled."""
        return self.scaler is not None and self.scaler.is_enabled()

    def loss_scale(self) -> float | None:
        """Return the loss scale, or None without one. Waits for the device."""
        return float(self.scaler.get_scale()) if self.has_loss_scale else None

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the loss scale."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the loss scale, at most once a step."""
        if self.scaler is not None:
            with complex_parameters.as_real(optimizer):
                self.scaler.unscale_(optimizer)

    @torch.no_grad()
    def rescale(self, optimizer: torch.optim.Optimizer, are_averaged: bool) -> None:
        """Multiply the gradients by the loss scale again, as no step has followed `unscale`.

        So a further backward pass may add to them, or begins anew if they have been set to zero.

        Args:
            optimizer: that of `unscale`.
            are_averaged: whether ranks had the same gradients in `unscale`. Then an overflow lowers
                the scale, as it would in a step: a loop that leaves out steps of infinite norm
                would meet no other.
        """
        if not self.has_loss_scale:
            return
        states = self.scaler._per_optimizer_states
        if are_averaged and states[id(optimizer)]["found_inf_per_device"]:
            self.scaler.update()
        states.pop(id(optimizer), None)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient = own_shard(parameter.grad)
                    gradient.mul_(self.scaler._scale.to(gradient.device))

    def unscale_and_look(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Divide the gradients by the loss scale, and return the flags of what overflowed.

        The next `step` is left out where one of them, float32 of one element, is not 0.
        """
        if not self.has_loss_scale:
            return []
        self.scaler.unscale_(optimizer)
        return [*self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()]

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step with averaged gradients; unscale those that are not; skip the step on overflow."""
        if self.scaler is None:
            optimizer.step()
            return
        if complex_parameters.in_optimizer(optimizer) and self._is_scaled(optimizer):
            self.unscale(optimizer)
        self.scaler.step(optimizer)
        self.scaler.update()

    def _is_scaled(self, optimizer: torch.optim.Optimizer) -> bool:
        if not self.has_loss_scale:
            return False
        return self.scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY

    @property
    def skips_nonfinite(self) -> bool:
        """Whether a step with NaN or infinity in its gradients is left out (`--on_nan skip`)."""
        return self.task.on_nan == "skip"

    @torch.no_grad()
    def find_nonfinite(self, optimizer: torch.optim.Optimizer) -> None:
        """Set `found_inf` by the averaged gradients; does not wait."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        self.found_inf = torch.zeros((), device=parameters[0].device)
        one = torch.ones((), device=parameters[0].device)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, self.found_inf, one)

    def copy_buffers(self, model: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return pairs of a buffer and its copy; none where no step is skipped."""
        if not self.skips_nonfinite:
            return []
        return [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    @torch.no_grad()
    def restore_buffers(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Give buffers their values before a step that was skipped; does not wait."""
        for buffer, before in copies:
            is_skipped = self.found_inf.to(buffer.device) > 0  # found on the host with --offload
            buffer.copy_(torch.where(is_skipped, before, buffer))
