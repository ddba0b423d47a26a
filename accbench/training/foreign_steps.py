"""Steps of optimizers that `accbench.accelerate` did not get, on the model's parameters.

An optimizer may be wrapped, as SAM and Lookahead wrap one (davda54/sam#8), or there may be several.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)  # fmt: skip

from accbench.errors import RequestError


class ForeignSteps(contextlib.AbstractContextManager["ForeignSteps"]):
    """Reports the steps of other optimizers while it is entered."""

    def __init__(
        self, model: nn.Module, original_parameters: Iterable[nn.Parameter],
        before: Callable[[torch.optim.Optimizer], None],
        after: Callable[[torch.optim.Optimizer], None],
    ) -> None:  # fmt: skip
        """Prepare the hooks; entering installs them.

        Args:
            model: the model.
            original_parameters: the parameters that the model had before an engine took it.
            before: called with an optimizer before its step.
            after: called with an optimizer after its step, but not in a backward pass, whose
                steps together count as one.
        """
        self._model, self._before, self._after = model, before, after
        now = {id(parameter) for parameter in model.parameters()}
        self._replaced = {id(p): weakref.ref(p) for p in original_parameters if id(p) not in now}
        self._is_ignored = self.is_in_backward = self._has_stepped = False
        self._handles: list[Any] = []

    def __enter__(self) -> "ForeignSteps":
        self._handles = [
            register_optimizer_step_pre_hook(self._on_begin),
            register_optimizer_step_post_hook(self._on_end),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        for handle in self._handles:
            handle.remove()

    @contextlib.contextmanager
    def ignored(self) -> Iterator[None]:
        """Report no step in the block, because it is part of a known one."""
        self._is_ignored = True
        try:
            yield
        finally:
            self._is_ignored = False

    @contextlib.contextmanager
    def in_backward(self) -> Iterator[None]:
        """Collect all steps in the block, a backward pass; `take_backward_step` reports them."""
        self.is_in_backward = True
        try:
            yield
        finally:
            self.is_in_backward = False

    def take_backward_step(self) -> bool:
        """Return whether an optimizer has stepped in the last backward pass, and forget it."""
        has_stepped, self._has_stepped = self._has_stepped, False
        return has_stepped

    def _on_begin(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._concerns(optimizer):
            self._before(optimizer)

    def _on_end(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._concerns(optimizer):
            return
        if self.is_in_backward:
            self._has_stepped = True
        else:
            self._after(optimizer)

    def _concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._is_ignored:
            return False
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(id(p) in self._replaced and self._replaced[id(p)]() is p for p in parameters):
            raise RequestError(
                f"this {type(optimizer).__name__} has parameters that the model had before "
                "accbench.accelerate, in whose place the engine has put others: build it after "
                "accelerate, from model.parameters()"
            )
        model_parameters = {id(parameter) for parameter in self._model.parameters()}
        return any(id(p) in model_parameters for p in parameters)
