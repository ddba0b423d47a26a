"""A run's records as TensorBoard events, written as they come: `tensorboard --logdir RUN`."""

import importlib.util
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch

from accbench.recording import records
from accbench.recording.terminal import log

FOLDER = "tensorboard"


def is_installed() -> bool:
    """Return whether TensorBoard is installed, without importing it."""
    return importlib.util.find_spec("tensorboard") is not None


class TensorBoardWriter:
    """Writer of windows, evaluations and a user's own metrics as scalars, by optimizer step.

    An event that cannot be written, for example because the disk is full, ends the writing with a
    warning and nothing else: the records have it all. torch's `SummaryWriter` is not used: it
    writes from a thread, whose errors are printed as tracebacks, and which another thread may then
    wait for without end.

    Args:
        run_dir: the run's folder.
        num_steps: optimizer steps done; events of later ones are void, being done again.
    """

    def __init__(self, run_dir: Path, num_steps: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # takes a second

        self._event, self._step = Event, num_steps
        # TensorBoard finds and orders the files of a folder by such names.
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._path: Path | None = run_dir / FOLDER / name
        self._append(file_version="brain.Event:2")
        self._append(step=num_steps + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, record: records.Record) -> None:
        """Write a record's scalars, if it has any."""
        from torch.utils.tensorboard import summary

        if isinstance(record, records.WindowRecord):
            self._step = record.first_step + record.num_steps
        elif isinstance(record, records.ResumeRecord):
            self._step = record.step
        metrics_step = record.step if isinstance(record, records.MetricsRecord) else None
        step = self._step if metrics_step is None else metrics_step
        for name, value in _scalars(record).items():
            if value is not None:
                self._append(step=step, summary=summary.scalar(name, value))

    def images(self, images_NCHW: torch.Tensor) -> None:
        """Write a grid of uint8 images as the model gets them."""
        from torch.utils.tensorboard import summary

        grid = summary.image("samples", images_NCHW, dataformats="NCHW")
        self._append(step=self._step, summary=grid)

    def _append(self, **fields: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        if self._path is None:
            return
        event = self._event(wall_time=time.time(), **fields)
        try:
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("ab") as file:
                RecordWriter(file).write(event.SerializeToString())
        except OSError as error:
            log.warning(f"TensorBoard events end here: cannot write {self._path}: {error.strerror}")
            self._path = None


def _scalars(record: records.Record) -> dict[str, float | None]:
    if isinstance(record, records.WindowRecord):
        scalars = {
            "train/loss": record.mean_loss,
            "train/learning_rate": record.lr,
            "memory/peak_GiB": record.peak_memory_bytes / 2**30,
            "compiler/graphs_compiled": float(record.num_compiles),
        }
        if not record.warmup:  # it holds compilation
            scalars["speed/samples_per_s"] = record.num_samples / record.wall_s
            scalars["speed/data_wait"] = record.data_wait_s / record.wall_s
        return scalars
    if isinstance(record, records.EvalRecord):
        group = "eval_averaged" if record.averaged else "eval"
        return {
            f"{group}/loss": record.loss, f"{group}/top1": record.top1,
            f"{group}/top5": record.top5,
        }  # fmt: skip
    if isinstance(record, records.MetricsRecord):
        return dict(record.metrics)
    return {}
