"""An engine that computes all and learns nothing, as a package of someone else's."""

from pathlib import Path

import torch

from accbench.engines import ddp


class Engine(ddp.Engine):
    """Leaves the step out."""

    def apply_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        pass


def install(folder: Path) -> Path:
    """Returns `folder`, which belongs on PYTHONPATH."""
    info = folder / "frozen_engine-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: frozen-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[accbench.engines]\nfrozen = tests.comparing.frozen:Engine\n"
    )
    return folder
