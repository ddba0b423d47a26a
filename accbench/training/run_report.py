"""What a run reports: the first and last line of its record, its windows, and terminal output."""

import socket
from dataclasses import replace
from datetime import datetime, timezone

import torch

from accbench import config, models
from accbench.config import TaskConfig
from accbench.distributed import process_group
from accbench.distributed.process_group import Topology
from accbench.engines import Engine
from accbench.errors import NonFiniteLossError, remedy_of_overflow
from accbench.logger import RunLogger
from accbench.recording import provenance, records
from accbench.recording.terminal import TrainingDisplay, log
from accbench.system import malloc
from accbench.training.step_timer import StepTimer


class Reporter:
    """Passes the timer's reports on to the record and the terminal."""

    def __init__(
        self, logger: RunLogger, display: TrainingDisplay, task: TaskConfig,
        engine: Engine, optimizer: torch.optim.Optimizer,
    ) -> None:  # fmt: skip
        self.logger, self.display, self.task = logger, display, task
        self.engine, self.optimizer = engine, optimizer
        self.num_skipped = self._num_skipped_before = 0

    def restored(self, num_steps: int) -> None:
        """Note how many of the restored run's steps were skipped, which do not count any more."""
        self._num_skipped_before = num_steps - self.engine.applied_steps(self.optimizer)

    def step(self, num_steps: int) -> None:
        """Move the progress bar."""
        self.display.step(num_steps)

    def window(self, record: records.WindowRecord) -> None:
        """Record a window and show it."""
        record = replace(record, lr=float(self.optimizer.param_groups[0]["lr"]))
        self.logger.write(record)
        if record.warmup:
            for line in self.engine.left_compiler():
                log.warning(f"left the compiler: {line}")
        assert self.task.batch_size is not None
        self.display.window(record, self.task.batch_size)
        if self.task.on_nan == "skip" and self.engine.precision.loss_scale() is None:
            before = self.num_skipped
            self._count_skipped(record.first_step + record.num_steps)
            if record.mean_loss is None and self.num_skipped == before:
                raise NonFiniteLossError(
                    "the loss is not finite in one of these steps, but the gradients are, by which "
                    "--on_nan skip knows what to leave out; mend the loss, or use --on_nan rollback"
                )

    def _count_skipped(self, num_steps: int) -> None:
        """Count skipped steps; all ranks count the same, as they have the same gradients.

        Raises:
            NonFiniteLossError: more steps than `--max_skips` were skipped since the start of this
                process.
        """
        num_skipped = num_steps - self.engine.applied_steps(self.optimizer)
        num_skipped -= self._num_skipped_before
        if num_skipped > self.num_skipped:
            notice = f"gradients were not finite in {num_skipped - self.num_skipped} of these steps"
            if num_skipped > self.task.max_skips:
                raise NonFiniteLossError(
                    f"{notice}, {num_skipped} since the start, --max_skips {self.task.max_skips}; "
                    + remedy_of_overflow(self.task.amp_level, self.task.amp_dtype)
                )
            log.warning(f"{notice}, which were skipped; {num_skipped} of {self.task.max_skips}")
        self.num_skipped = num_skipped


def log_start(task: TaskConfig, engine: Engine, topology: Topology, model_name: str) -> None:
    """Log what begins to train, on what, and what was changed in this process for it."""
    dtype = f" {task.amp_dtype}" if engine.precision.autocast_dtype else ""
    num_devices = topology.world_size * config.devices_per_worker(task)
    log.info(
        f"{task.engine} on {num_devices} x {engine.device_name}, {model_name}, "
        f"{task.amp_level}{dtype}, batch {task.batch_size} a worker, records in {task.run_dir}"
    )
    if malloc.is_kept:
        log.info(malloc.NOTICE)


def run_record(
    task: TaskConfig, engine: Engine, topology: Topology, num_classes: int | None
) -> records.RunRecord:
    """Make the record's first line."""
    assert task.batch_size is not None
    spec = models.of_task(task)  # a user's spec may have only what training needs
    return records.RunRecord(
        task=config.as_mapping(task),
        engine=task.engine,
        model=task.model,
        world_size=topology.world_size,
        batch_size=task.batch_size,
        amp_level=config.amp_level(task),
        amp_dtype=task.amp_dtype if config.amp_level(task) == "O1" else None,
        device_type=task.device,
        device_name=engine.device_name,
        collectives=engine.strategy.collectives,
        compile_cache=engine.compile_cache,
        num_threads=torch.get_num_threads(),
        versions=provenance.versions(),
        commit=provenance.commit(),
        hostname=socket.gethostname(),
        hosts=process_group.all_gather_strings(socket.gethostname()),
        compiler=engine.compiler,
        environment=provenance.environment(),
        num_classes=num_classes,
        unit=getattr(spec, "unit", "samples"),
        units_per_sample=getattr(spec, "units_per_sample", 1),
        mesh=engine.mesh.sizes,
        devices_per_worker=config.devices_per_worker(task),
        started_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def end_record(
    engine: Engine, optimizer: torch.optim.Optimizer, timer: StepTimer, num_bad_samples: int,
    steps_per_epoch: int,
) -> records.EndRecord:  # fmt: skip
    """Make the record's last line for a run that succeeded."""
    stats, steady = engine.compile_stats(), timer.steady
    assert engine.task.batch_size is not None
    samples_a_step = engine.task.batch_size * engine.mesh.num_data_ranks
    steps = timer.num_steady_steps
    return records.EndRecord(
        status="ok",
        time_to_first_step_s=timer.time_to_first_step_s,
        compile_s=stats.compile_s,
        num_compiles=stats.num_compiles,
        num_recompiles=steady.num_compiles,
        shape_changes=timer.shapes.changes or None,
        num_graphs=steady.num_executions / steps if steps else None,
        num_fallbacks=(timer.warmup + steady).num_fallbacks,
        left_compiler=engine.left_compiler() or None,
        state_bytes=engine.state_bytes(optimizer),
        offloaded_bytes=engine.offloaded_bytes(optimizer),
        skipped_steps=timer.num_steps - engine.applied_steps(optimizer),
        num_steps=timer.num_steps,
        num_samples=timer.num_samples_of_all,
        num_bad_samples=num_bad_samples,
        samples_per_epoch=steps_per_epoch * samples_a_step,
        waited_s=timer.waited_s or None,
    )
