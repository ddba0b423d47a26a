"""The contract of engines that take a step in parts: forward, backward, reduce, update.

A loop of a user's own calls these parts (`accbench.accelerate`), and so does accbench's own
`train_step`. An engine that compiles whole steps does not meet it, and names another that does
(`Engine.for_loops`).
"""

import abc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from accbench.engines import Batch, Engine


class LoopEngine(Engine):
    """What runs a step in parts."""

    def run_step(
        self,
        step: Callable[..., torch.Tensor],
        model: nn.Module,
        spec: Any,
        optimizer: torch.optim.Optimizer,
        batch: Batch,
    ) -> torch.Tensor:
        """Run the loop's `train_step` on a batch; an engine may replay one that it recorded."""
        return step(self, model, spec, optimizer, batch)

    def run_score(self, model: nn.Module, spec: Any, batch: Batch) -> torch.Tensor:
        """Return `spec.score`, (4,), of a batch on the device, for nobody to wait for."""
        with self.autocast():
            score: torch.Tensor = spec.score(model, batch)
        return score

    # The parts of `train_step`.

    @abc.abstractmethod
    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context that the forward pass runs in."""

    @abc.abstractmethod
    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Compute gradients of the scaled loss, as `torch.Tensor.backward` does."""

    def compute_gradients(self, model: nn.Module, spec: Any, parts: list[Batch]) -> torch.Tensor:
        """Compute gradients of the mean loss of a batch's parts, and return it.

        Args:
            model: from `prepared`.
            spec: the model's spec.
            parts: equal parts of a batch on the device, the micro-batches of `--accumulate`.
        """
        *earlier, last = parts
        total = None
        for part in earlier:
            with self.without_reduction(model):
                loss = self._compute_gradients(model, spec, part, len(parts))
            total = loss if total is None else total + loss
        loss = self._compute_gradients(model, spec, last, len(parts))
        return loss if total is None else total + loss

    def _compute_gradients(
        self, model: nn.Module, spec: Any, part: Batch, num_parts: int
    ) -> torch.Tensor:
        loss = self._loss_of_part(model, spec, part, num_parts)
        self.backward(loss)
        return loss.detach()

    def _loss_of_part(
        self, model: nn.Module, spec: Any, part: Batch, num_parts: int
    ) -> torch.Tensor:
        with self.autocast():
            loss: torch.Tensor = spec.loss(model, part)
        return loss / num_parts if num_parts > 1 else loss

    @abc.abstractmethod
    def apply_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Average gradients over ranks, unscale, step; nothing on overflow."""

    def without_reduction(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward passes average nothing; `apply_gradients` will."""
        return nullcontext()

    def clip(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip averaged, unscaled gradients to `--clip_norm`; does not wait."""
        if self.task.clip_norm is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, self.task.clip_norm)

    # For a loop of a user's own: how it calls the model, and `apply_gradients` in parts.

    def calling(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context that the loop's calls of the prepared model run in."""
        return self.autocast()

    def batch_for_loop(self, batch: Batch) -> Batch:
        """Return a batch on the device in a form that the loop may do anything with."""
        return batch

    def leave_batches(self) -> None:  # noqa: B027
        """Note that the loop has left a pass over a loader, maybe in the middle of a step."""

    def output_for_loop(self, nest: Any) -> Any:
        """Return the model's output in a form that the loop may do anything with."""
        return nest

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """Make an optimizer that a user built one for this engine; it stays the same object.

        Args:
            optimizer: of the parameters that the model has now.
            model: from `prepare`.

        Raises:
            RequestError: the engine cannot do what it is set to.
        """
        return

    def reduce_gradients(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Average gradients over ranks, where `backward` has not done so.

        Args:
            model: the user's, of which further optimizers may step some parameters.
            optimizer: from `adopt_optimizer`.
        """
        return

    def step_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Step with gradients that are averaged; unscale those that are not; skip on overflow."""
        self.precision.step(optimizer)
