"""Engines with a planted fault, as a package of someone else's: found by its entry points.

`install(FOLDER)` writes the package's metadata; with FOLDER on PYTHONPATH the engines
are there under these names.
"""

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accbench.engines import ddp

NAMES = {
    "not_averaged": "NotAveraged",
    "bn_momentum": "BatchNormMomentum",
    "wrong_epsilon": "WrongEpsilon",
    "slowed": "Slowed",
    "crashes": "Crashes",
}


def install(folder: Path) -> Path:
    """Returns `folder`."""
    info = folder / "planted_engines-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted-engines\nVersion: 1.0\n")
    lines = [f"{name} = tests.planted:{class_}" for name, class_ in NAMES.items()]
    (info / "entry_points.txt").write_text("\n".join(["[accbench.engines]", *lines, ""]))
    return folder


class NotAveraged(ddp.Engine):
    """Every rank keeps its own gradients; the proof at the start still goes well."""

    def prepare(self, model: nn.Module) -> nn.Module:
        return model.to(self.device)


class BatchNormMomentum(ddp.Engine):
    """Running statistics move a little too fast."""

    def prepare(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 0.11
        return super().prepare(model)


class WrongEpsilon(ddp.Engine):
    """AdamW with 1e-6 where 1e-8 is right."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer(model)
        for group in optimizer.param_groups:
            group["eps"] = 1e-6
        return optimizer


class Slowed(ddp.Engine):
    """Sleeps a tenth of what each step took."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._ended = time.perf_counter()

    def end_step(self) -> None:
        time.sleep(0.1 * (time.perf_counter() - self._ended))
        self._ended = time.perf_counter()


class Crashes(ddp.Engine):
    """Cannot place the model."""

    def prepare(self, model: nn.Module) -> nn.Module:
        raise RuntimeError("planted crash")
