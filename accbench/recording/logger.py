"""Notes beside a run's own records, the same from an engine or from a user's script."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accbench import config
from accbench.recording import records
from accbench.recording.tensorboard_writer import TensorBoardWriter


class RunLogger:
    """Logger that appends to `RUN/records.jsonl`; it does nothing on ranks other than 0.

    >>> logger = RunLogger("runs/mine")
    >>> logger.log_params({"dropout": 0.1})
    >>> logger.log_metrics({"grad_norm": 1.5}, step=20)
    """

    def __init__(self, run_dir: str | Path, rank: int = 0) -> None:
        self.tensorboard: TensorBoardWriter | None = None
        """A second receiver of every record."""
        self.path = Path(run_dir) / config.RECORDS_FILE
        self.active = rank == 0
        if self.active:
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, record: records.Record) -> None:
        """Append one record."""
        if self.active:
            records.append(self.path, record)
            if self.tensorboard is not None:
                self.tensorboard.write(record)

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Note settings: name -> anything that JSON holds."""
        self.write(records.ParamsRecord(dict(params)))

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Note numbers: name -> value, at an optimizer step if one is given."""
        values = {name: records.finite_or_none(float(value)) for name, value in metrics.items()}
        self.write(records.MetricsRecord(values, step))
