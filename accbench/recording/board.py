"""A run's records for TensorBoard, as they are written: `tensorboard --logdir RUN`."""

import contextlib
import importlib.util
from pathlib import Path
from typing import Any

import torch

from accbench.recording import records

FOLDER = "tensorboard"


def installed() -> bool:
    """Whether TensorBoard is there; it is not imported."""
    return importlib.util.find_spec("tensorboard") is not None


class Board:
    """Writes windows, evaluations and a user's own metrics as scalars, by optimizer step.

    What cannot be written, the disk being full for one, is left out: the records have it all.

    Args:
        run_dir: the run's folder.
        num_steps: optimizer steps done; what is there of later ones is void, being done again.
    """

    def __init__(self, run_dir: Path, num_steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second

        self._step = num_steps
        self._writer: Any = SummaryWriter(str(run_dir / FOLDER), purge_step=num_steps + 1)

    def write(self, record: records.Record) -> None:
        """The scalars of a record, if it has any."""
        if isinstance(record, records.WindowRecord):
            self._step = record.first_step + record.num_steps
        elif isinstance(record, records.ResumeRecord):
            self._step = record.step
        for name, value in _scalars(record).items():
            if value is not None:
                with contextlib.suppress(OSError):
                    self._writer.add_scalar(name, value, self._step_of(record))

    def _step_of(self, record: records.Record) -> int:
        own = record.step if isinstance(record, records.MetricsRecord) else None
        return self._step if own is None else own

    def images(self, images_NCHW: torch.Tensor) -> None:
        """uint8 images as the model is given them."""
        with contextlib.suppress(OSError):
            self._writer.add_images("samples", images_NCHW, self._step)

    def close(self) -> None:
        """Write what is still in memory."""
        with contextlib.suppress(OSError):
            self._writer.close()


def _scalars(record: records.Record) -> dict[str, float | None]:
    if isinstance(record, records.WindowRecord):
        found = {
            "train/loss": record.mean_loss,
            "train/learning_rate": record.lr,
            "memory/peak_GiB": record.peak_memory_bytes / 2**30,
            "compiler/graphs_compiled": float(record.num_compiles),
        }
        if not record.warmup:  # it holds compilation
            found["speed/samples_per_s"] = record.num_samples / record.wall_s
            found["speed/data_wait"] = record.data_wait_s / record.wall_s
        return found
    if isinstance(record, records.EvalRecord):
        group = "eval_averaged" if record.averaged else "eval"
        return {
            f"{group}/loss": record.loss, f"{group}/top1": record.top1,
            f"{group}/top5": record.top5,
        }  # fmt: skip
    if isinstance(record, records.MetricsRecord):
        return dict(record.metrics)
    return {}
