"""Mixed precision of engine jax: autocast while a step is captured, and the loss scale."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from accbench.config import TaskConfig
from accbench.engines.common import cuda_autocast
from accbench.engines.precision import Precision


class JaxPrecision(Precision):
    """The types of a step of JAX's, which has the loss scale among its state.

    Args:
        task: the run's.
        fused: compute by accbench's fused functions, with CUDA's casts (`--jax.lean`).
        read_loss_scale: returns the scale from the step's state; None before there is a state.
        keeps_attention: capture attention as one operation, where cuDNN has it.
    """

    def __init__(
        self,
        task: TaskConfig,
        fused: Literal["auto", "on", "off"],
        read_loss_scale: Callable[[], float | None],
        keeps_attention: bool = False,
    ) -> None:
        super().__init__(task)
        self._read_loss_scale = read_loss_scale
        self.keeps_attention = keeps_attention
        on_cuda = task.device == "cuda"
        self._uses_fused_ops = fused == "on" or (fused == "auto" and on_cuda)
        if self.needs_loss_scale:
            self.scaler = torch.amp.GradScaler("cpu")  # where torch's tensors are
            self.scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))

    def loss_scale(self) -> float | None:
        return None if self.scaler is None else self._read_loss_scale()

    def host_autocast(self) -> AbstractContextManager[Any]:
        """Enter autocast for a forward pass that torch computes on the host."""
        if self.autocast_dtype is None:
            return nullcontext()
        # The graph's backward pass is traced apart, and must not find casts of the forward's.
        return torch.autocast("cpu", self.autocast_dtype, cache_enabled=False)

    def capture_autocast(self) -> AbstractContextManager[Any]:
        """Enter autocast of the device that is to compute, in a capture."""
        if self.autocast_dtype is None:
            return nullcontext()
        if self._uses_fused_ops or self.task.device == "cuda":
            # torch's rules for CUDA are not those for a CPU.
            from accbench.engines.jax import fused_ops

            ops = fused_ops.overrides(self.keeps_attention) if self._uses_fused_ops else None
            return cuda_autocast.autocast(self.autocast_dtype, ops)
        return self.host_autocast()
