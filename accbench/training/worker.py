"""One worker from start to end; `main.py`, torchrun and the launchers run it."""

import contextlib
import faulthandler
import json
import os
import re
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch

from accbench import config, models, resolving
from accbench.config import TaskConfig, plugins
from accbench.distributed import process_group, slurm_variables
from accbench.distributed.process_group import Topology
from accbench.engines import Engine
from accbench.engines.common import model_state
from accbench.errors import (
    ERROR_FILE_VARIABLE,
    LAUNCHER_PID_VARIABLE,
    STOPPED_STATUS,
    NonFiniteLossError,
    NotMetError,
    RequestError,
    StoppedError,
    end_status,
    remedy_of_overflow,
)
from accbench.logger import RunLogger
from accbench.models.tasks import trainable
from accbench.recording import provenance, records, run_folder, tensorboard_writer, terminal
from accbench.recording.tensorboard_writer import TensorBoardWriter
from accbench.recording.terminal import TrainingDisplay, log
from accbench.system import cache_folders, malloc, standard_streams
from accbench.system.stop_signals import die_with_parent
from accbench.training import checkpoints, flops, resume, script
from accbench.training.epochs import Epochs
from accbench.training.opening import open_first_engine
from accbench.training.step_timer import StepTimer

# Number of images of the first batch that TensorBoard shows.
_NUM_PREVIEWED = 16


def main(
    argv: Sequence[str] | None = None,
    started: float | None = None,
    job: Callable[[TaskConfig, Topology, float, Any], None] | None = None,
) -> int:
    """Train as the arguments say, and return the exit status.

    Args:
        argv: flags, as `launch_single_task.py` takes them; None for those of the process.
        started: `time.perf_counter()` when the process began.
        job: what to do instead of training; called with the arguments of `run`.
    """
    status = _worker(argv, time.perf_counter() if started is None else started, job or run)
    if status and status != STOPPED_STATUS:
        process_group.leave_at_once(status)
    process_group.close()
    return status


def _worker(
    argv: Sequence[str] | None, started: float,
    job: Callable[[TaskConfig, Topology, float, Any], None],
) -> int:  # fmt: skip
    faulthandler.enable()  # a crash in C++ then shows where Python was
    standard_streams.escape_unencodable()
    try:
        slurm_variables.adopt()
    except RequestError as error:
        return _failed(error, Topology(), None)
    topology = Topology.from_env()
    launched = ERROR_FILE_VARIABLE in os.environ
    if launched or "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's agent is a launcher, too
        launcher = os.environ.get(LAUNCHER_PID_VARIABLE)
        die_with_parent(None if launcher is None else int(launcher))
    with contextlib.ExitStack() as stack:
        try:
            flags = _without_local_rank(sys.argv[1:] if argv is None else argv)
            task = config.parse(flags, prog="main.py")
            task = replace(task, nproc_per_node=topology.local_world_size)
            task = resolving.resolve(task)
            apply_environment(task, topology)
            if not launched:
                process_group.init_distributed(topology, task.device, task.timeout_s)
                task = shared_output_dir(task, topology, stack)
        except RequestError as error:
            return _failed(error, topology, None)
        try:
            console = stack.enter_context(terminal.worker_output(task.run_dir, topology.rank))
            if launched:  # gloo prints a greeting on stdout, which is kept from the terminal
                with terminal.redirect_descriptors(terminal.log_file(task.run_dir, topology.rank)):
                    process_group.init_distributed(topology, task.device, task.timeout_s)
                task = resume.rejoin(task, topology)
            job(task, topology, started, console)
        except (Exception, KeyboardInterrupt) as error:
            return _failed(error, topology, task.run_dir)
    return 0


def _without_local_rank(argv: Sequence[str]) -> list[str]:
    """Remove the flag that torch.distributed.launch adds, as its environment says the same."""
    if "LOCAL_RANK" not in os.environ:
        return [*argv]
    return [flag for flag in argv if not re.fullmatch(r"--local[-_]rank=\d+", flag)]


def apply_environment(task: TaskConfig, topology: Topology) -> None:
    """Set the engine's environment variables, missing cache folders, and the threads.

    Raises:
        RequestError: there is no folder that can be written.
    """
    engine_class = plugins.load("engines", task.engine)
    for name, value in engine_class.worker_env(task, topology.local_rank).items():
        os.environ.setdefault(name, value)
    run_dir = None if task.output_dir is None else task.run_dir
    for name, value in cache_folders.environment(run_dir).items():
        os.environ[name] = value  # a value that is set names a folder that cannot be written
        if name == "TMPDIR":
            tempfile.tempdir = None  # it caches the first value
    assert task.threads is not None
    torch.set_num_threads(task.threads)
    if task.device == "cpu":
        malloc.keep_memory()  # which a launcher says before the process starts


def shared_output_dir(
    task: TaskConfig, topology: Topology, stack: contextlib.ExitStack
) -> TaskConfig:
    """Create and lock the run's folder on rank 0, and share its path with all ranks."""
    error = None
    if topology.rank == 0:
        try:
            task = stack.enter_context(run_folder.claim_output_dir(task))
            task = resume.with_checkpoint(task, lambda line: print(line, flush=True))
        except RequestError as caught:
            error = str(caught)
    error = process_group.broadcast_value(error)
    if error is not None:
        raise RequestError(error)
    return replace(
        task,
        output_dir=process_group.broadcast_value(task.output_dir),
        resume=process_group.broadcast_value(task.resume),
    )


def run(task: TaskConfig, topology: Topology, started: float, console: Any) -> None:
    """Train, evaluate and record."""
    if task.script is not None:
        script.run(task, topology, started, console)
        return
    logger = RunLogger(task.run_dir, topology.rank)
    source_name, location = config.data_name(task.data)
    engine = open_first_engine(task, topology)
    source = plugins.load("data", source_name)(
        location, task, task.options.get(source_name), topology
    )
    header = run_record(task, engine, topology, source.num_classes)
    logger.write(header)
    log_start(task, engine, topology, task.model)
    engine.strategy.prove()
    spec = models.of_task(task)
    torch.manual_seed(task.seed)
    model = trainable.plain(spec.build(source.num_classes))
    engine.check_model(model)
    process_group.broadcast_module(model)
    model_state.broadcast_extra(model)
    if task.save_interval:
        model_state.check_loadable(model)
    net, model = model, engine.prepared(model)
    optimizer = engine.build_optimizer(model)
    engine.seed(task.seed + topology.rank)  # dropout and the like differ by rank

    train_loader, eval_loader = source.train_loader(), source.eval_loader()
    for loader in (train_loader, eval_loader):
        if loader is not None:
            loader.problems = log.warning
            loader.check = partial(_check, task, spec, source.num_classes)
    steps_per_epoch = len(train_loader)
    num_steps = min(task.max_steps or sys.maxsize, task.epochs * steps_per_epoch)
    keeper = resume.Keeper(
        engine, net, optimizer, train_loader, source.num_classes, topology, _writer(task, topology)
    )
    with TrainingDisplay(console, num_steps, header.counted) as display:
        timer = StepTimer(engine, started, Reporter(logger, display, task, engine, optimizer))
        epochs = Epochs(
            engine, model, spec, optimizer, train_loader, eval_loader, timer,
            keeper, logger, display, steps_per_epoch,
        )  # fmt: skip
        epochs.restore()
        logger.tensorboard = _open_tensorboard(task, topology, train_loader, timer.num_steps)
        epochs.run()
    bad = sum(loader.num_bad_samples for loader in (train_loader, eval_loader) if loader)
    num_bad = int(sum(n for (n,) in process_group.all_gather_values([bad])))
    end = end_record(engine, optimizer, timer, num_bad, steps_per_epoch)
    # A user's code is not run once more for this, as it may do anything.
    if topology.rank == 0 and not models.is_user_model(task.model):
        end = replace(end, flops_per_sample=flops.of_sample(spec, source.num_classes))
    logger.write(end)
    engine.close()
    log.info(f"done: {end.num_steps} steps, {end.num_samples} samples, records in {task.run_dir}")


def _check(task: TaskConfig, spec: Any, num_classes: int, batch: Any) -> None:
    """Check a batch on the host, as some devices read arbitrary memory at a wrong index.

    Raises:
        RequestError: the model cannot take the batch.
    """
    problem = spec.problem(batch, num_classes) if hasattr(spec, "problem") else None
    if problem is not None:
        raise RequestError(f"--data {task.data} with --model {task.model}: {problem}")


def _writer(task: TaskConfig, topology: Topology) -> checkpoints.Writer | None:
    if topology.rank != 0 or not task.save_interval:
        return None
    stop = task.on_save_error == "stop"
    return checkpoints.Writer(task.run_dir, task.keep_checkpoints, stop, log.warning)


def _open_tensorboard(
    task: TaskConfig, topology: Topology, loader: Any, num_steps: int
) -> TensorBoardWriter | None:
    """Open TensorBoard on rank 0, with some images if the run begins."""
    if topology.rank != 0 or task.tensorboard == "off" or not tensorboard_writer.is_installed():
        return None
    opened = TensorBoardWriter(task.run_dir, num_steps)
    images = loader.preview(_NUM_PREVIEWED) if num_steps == 0 else None
    if images is not None:
        opened.images(images)
    return opened


class Reporter:
    """Passes the timer's reports on to the record and the terminal."""

    def __init__(
        self, logger: RunLogger, display: TrainingDisplay, task: TaskConfig,
        engine: Engine, optimizer: torch.optim.Optimizer,
    ) -> None:  # fmt: skip
        self.logger, self.display, self.task = logger, display, task
        self.engine, self.optimizer = engine, optimizer
        self.num_skipped = 0

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
            NonFiniteLossError: more steps than `--max_skips` were skipped since the start.
        """
        num_skipped = num_steps - self.engine.applied_steps(self.optimizer)
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
    log.info(
        f"{task.engine} on {topology.world_size} x {engine.device_name}, {model_name}, "
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
        started_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def end_record(
    engine: Engine, optimizer: torch.optim.Optimizer, timer: StepTimer, num_bad_samples: int,
    steps_per_epoch: int,
) -> records.EndRecord:  # fmt: skip
    """Make the record's last line for a run that succeeded."""
    stats, steady = engine.compile_stats(), timer.steady
    assert engine.task.batch_size is not None
    samples_a_step = engine.task.batch_size * engine.topology.world_size
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
        skipped_steps=timer.num_steps - engine.applied_steps(optimizer),
        num_steps=timer.num_steps,
        num_samples=timer.num_samples_of_all,
        num_bad_samples=num_bad_samples,
        samples_per_epoch=steps_per_epoch * samples_a_step,
    )


def _launcher_is_gone() -> bool:
    launcher = os.environ.get(LAUNCHER_PID_VARIABLE)
    return launcher is not None and os.getppid() != int(launcher)


def _record(topology: Topology, run_dir: Path | None, status: str, why: str) -> None:
    """End the run's record, on rank 0."""
    if run_dir is not None and topology.rank == 0:
        with contextlib.suppress(RequestError):
            records.append_failure(run_dir / config.RECORDS_FILE, status, why)


def _failed(error: BaseException, topology: Topology, run_dir: Path | None) -> int:
    """Report an error once and where it belongs, and return the exit status."""
    name, text = type(error).__name__, "".join(traceback.format_exception(error))
    if isinstance(error, StoppedError):
        # Written here, because whoever asked for the stop may kill the launcher before it can.
        _record(topology, run_dir, end_status(name, str(error)), str(error))
    error_file = os.environ.get(ERROR_FILE_VARIABLE)
    if error_file is not None and not _launcher_is_gone():
        # The launcher tells the person, and ends the record.
        error_file = error_file.replace("{local_rank}", str(topology.local_rank))
        error_file = error_file.replace("{rank}", str(topology.rank))
        details = {
            "unix_time": time.time(), "rank": topology.rank, "name": name, "message": str(error),
            "traceback": text,
        }  # fmt: skip
        with Path(error_file).open("r+") as file:  # over blanks that reserve its space
            file.write(json.dumps(details))
        if run_dir is not None:
            with (
                contextlib.suppress(OSError),
                terminal.log_file(run_dir, topology.rank).open("ab") as file,
            ):
                file.write(text.encode(errors="backslashreplace"))
    elif isinstance(error, RequestError | StoppedError):
        if topology.rank == 0 or isinstance(error, NotMetError):
            print(f"main.py: {error}", file=sys.stderr)
    else:
        print(text, file=sys.stderr)
        _record(topology, run_dir, end_status(name, str(error)), f"rank 0: {name}: {error}")
    if isinstance(error, RequestError):
        return 2
    if isinstance(error, StoppedError):
        return STOPPED_STATUS
    return 130 if isinstance(error, KeyboardInterrupt) else 1
