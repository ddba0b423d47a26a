"""Mixed precision of engine xla: autocast, and a loss scale that never waits for the host."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from accbench.config import TaskConfig
from accbench.engines.precision import Precision
from accbench.engines.xla import autocast


class XlaPrecision(Precision):
    """The types of a step on XLA's device.

    Args:
        task: the run's.
        device: XLA's.
        fused: compute in the form that moves fewer bytes on a GPU (`--xla.lean`).
    """

    def __init__(self, task: TaskConfig, device: torch.device, fused: bool) -> None:
        super().__init__(task)
        self._device, self._fused = device, fused
        if self.needs_loss_scale:
            from accbench.engines.xla import sync_free

            with warnings.catch_warnings():  # torch_xla names its parent by an old name
                warnings.simplefilter("ignore", FutureWarning)
                self.scaler = sync_free.SyncFreeGradScaler()
        self.no_overflow = torch.zeros(()).to(device)
        """What an optimizer's `found_inf` is where nobody looks for overflows."""

    def loss_scale(self) -> float | None:
        # Not `get_scale()`, which counts as an operation that left the compiler.
        if self.scaler is None or self.scaler._scale is None:
            return None
        return float(self.scaler._scale.cpu().item())

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context that the forward pass runs in."""
        if self.autocast_dtype is None:
            return nullcontext()
        return autocast.autocast(self.autocast_dtype, self._fused)

    def create_scaler_state(self) -> None:
        """Create the scaler's state, if there is one, in the form that a step leaves.

        The growth tracker is an integer at first and a computed tensor later, which would make
        the second step another graph. So one update that changes nothing is run, and its count
        taken back.
        """
        import torch_xla

        scaler = self.scaler
        if scaler is None:
            return
        scaler._lazy_init_scale_growth_tracker(self._device)
        torch._amp_update_scale_(
            scaler._scale, scaler._growth_tracker, self.no_overflow,
            scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval(),
        )  # fmt: skip
        torch_xla.sync()
        scaler._growth_tracker.zero_()
        torch_xla.sync()
