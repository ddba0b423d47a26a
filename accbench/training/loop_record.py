"""The record of a user's own loop: first line, last line, failure."""

import contextlib
from dataclasses import replace

import torch

from accbench.config import TaskConfig
from accbench.distributed import process_group
from accbench.distributed.process_group import Topology
from accbench.engines import Engine
from accbench.errors import RequestError, end_status
from accbench.logger import RunLogger
from accbench.recording import records, tensorboard_writer
from accbench.recording.tensorboard_writer import TensorBoardWriter
from accbench.training import run_report
from accbench.training.step_timer import StepTimer


def write_header(
    logger: RunLogger, task: TaskConfig, engine: Engine, topology: Topology, model_name: str
) -> None:
    """Write the record's first line, and log what begins to train."""
    header = run_report.run_record(task, engine, topology, num_classes=None)
    header = replace(header, model=model_name)
    logger.write(header)
    if topology.rank == 0 and task.tensorboard != "off" and tensorboard_writer.is_installed():
        logger.tensorboard = TensorBoardWriter(task.run_dir, 0)
    run_report.log_start(task, engine, topology, header.model)


def end_record(
    engine: Engine, optimizer: torch.optim.Optimizer, timer: StepTimer, num_applied: int
) -> records.EndRecord:
    """Make the record's last line; every rank calls it.

    Args:
        engine: of the run.
        optimizer: that the loop steps.
        timer: of the run's steps.
        num_applied: how often an optimizer stepped: a scaler does not call one that overflowed.
    """
    end = run_report.end_record(engine, optimizer, timer, 0, 0)
    rank_samples = process_group.all_gather_values([float(timer.num_samples)])
    num_skipped: int | None = 0
    if engine.precision.loss_scale() is not None:
        # Overflowed steps, which were not called or changed nothing.
        num_skipped = timer.num_steps - num_applied
        if not num_skipped and any("step" in state for state in optimizer.state.values()):
            num_skipped = end.skipped_steps
    return replace(
        end,
        num_samples=int(sum(n for (n,) in rank_samples)),
        skipped_steps=num_skipped,
        num_bad_samples=None,
        samples_per_epoch=None,
    )


def write_failure(logger: RunLogger, error: BaseException, rank: int, num_steps: int) -> None:
    """End the record with the error that the script ended with."""
    name = type(error).__name__
    end = records.EndRecord(
        end_status(name, str(error)), f"rank {rank}: {name}: {error}", num_steps=num_steps
    )
    with contextlib.suppress(RequestError):
        logger.write(end)
