"""One worker from start to end; `main.py`, torchrun and the launchers run it."""

import contextlib
import faulthandler
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from accbench import config, models, resolving
from accbench.config import TaskConfig, plugins
from accbench.data import Loader
from accbench.distributed import (
    context_parallel,
    process_end,
    process_group,
    slurm_variables,
)
from accbench.distributed.collectives import RankGroup
from accbench.distributed.process_group import Topology
from accbench.engines import Engine
from accbench.engines.common import model_state
from accbench.errors import (
    ERROR_FILE_VARIABLE,
    LAUNCHER_PID_VARIABLE,
    STOPPED_STATUS,
    RequestError,
)
from accbench.logger import RunLogger
from accbench.models.tasks import trainable
from accbench.recording import run_folder, tensorboard_writer, terminal
from accbench.recording.tensorboard_writer import TensorBoardWriter
from accbench.recording.terminal import TrainingDisplay, log
from accbench.system import cache_folders, malloc, standard_streams
from accbench.system.gc_pause import pause_gc
from accbench.system.stop_signals import die_with_parent
from accbench.training import checkpoints, failures, flops, resume, script
from accbench.training.epochs import Epochs
from accbench.training.label_counts import LabelCounts
from accbench.training.opening import import_dynamo, open_engine
from accbench.training.run_report import Reporter, end_record, log_start, run_record
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
        process_end.leave_at_once(status)
    process_end.close_and_end(status)
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
        return failures.report(error, Topology(), None)
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
            if not launched:  # a launcher has restarted itself
                resolving.restart_for([task.engine], sys.argv[1:] if argv is None else argv)
            task = resolving.resolve(task)
            apply_environment(task, topology)
            if not launched:
                process_group.init_distributed(topology, task.device, task.timeout_s)
                task = shared_output_dir(task, topology, stack)
        except RequestError as error:
            return failures.report(error, topology, None)
        try:
            console = stack.enter_context(terminal.worker_output(task.run_dir, topology.rank))
            if launched:  # gloo prints a greeting on stdout, which is kept from the terminal
                with terminal.redirect_descriptors(terminal.log_file(task.run_dir, topology.rank)):
                    process_group.init_distributed(topology, task.device, task.timeout_s)
                task = resume.rejoin(task, topology)
            job(task, topology, started, console)
        except (Exception, KeyboardInterrupt) as error:
            return failures.report(error, topology, task.run_dir)
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
    set_by_user = os.environ.keys() - engine_class.variables_replaced_by_flags(task)
    for name, value in engine_class.worker_env(task, topology.local_rank).items():
        if name not in set_by_user:
            os.environ[name] = value
    run_dir = None if task.output_dir is None else task.run_dir
    for name, value in cache_folders.environment(run_dir).items():
        os.environ[name] = value  # a value that is set names a folder that cannot be written
        if name == "TMPDIR":
            tempfile.tempdir = None  # it caches the first value
    assert task.threads is not None
    if torch.get_num_threads() != task.threads:
        # Setting even the number that is there turns off MKL's choice of fewer threads for small
        # products, with which a plain loop trains.
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
    with pause_gc():
        engine = open_engine(task, topology)
    data_topology = engine.mesh.data_topology(topology)
    source = plugins.load("data", source_name)(
        location, task, task.options.get(source_name), data_topology
    )
    train_loader, eval_loader = source.train_loader(), source.eval_loader()
    if isinstance(train_loader, Loader):
        train_loader.start_processes()
    import_dynamo()
    header = run_record(task, engine, topology, source.num_classes)
    logger.write(header)
    log_start(task, engine, topology, task.model)
    engine.strategy.prove()
    spec = models.of_task(task)
    net, model = build_model(engine, lambda: trainable.plain(spec.build(source.num_classes)))
    optimizer = engine.build_optimizer(model)
    transform = share_sequences(engine, spec, net)
    tokens = engine.mesh.of_gradients.data_topology(topology)
    engine.seed(task.seed + tokens.rank)  # dropout and the like differ by batch

    for loader in (train_loader, eval_loader):
        if loader is not None:
            loader.problems = log.warning
            loader.check = partial(_check, task, spec, source.num_classes)
            loader.transform = transform
    steps_per_epoch = len(train_loader)
    keeper = resume.Keeper(
        engine, net, optimizer, train_loader, source.num_classes, topology, _writer(task, topology)
    )
    with TrainingDisplay(console, None, header.counted) as display:
        reporter = Reporter(logger, display, task, engine, optimizer)
        timer = StepTimer(engine, started, reporter)
        epochs = Epochs(
            engine, model, spec, optimizer, train_loader, eval_loader,
            LabelCounts(engine, spec, source), timer, keeper, logger, display, steps_per_epoch,
        )  # fmt: skip
        epochs.restore()
        reporter.restored(timer.num_steps)
        logger.tensorboard = _open_tensorboard(task, topology, train_loader, timer.num_steps)
        epochs.run()
    bad = sum(
        loader.num_bad_samples for loader in (train_loader, eval_loader) if loader is not None
    )
    num_bad = int(sum(n for (n,) in process_group.all_gather_values([bad])))
    num_bad = num_bad * engine.mesh.num_data_ranks // engine.mesh.world_size
    end = end_record(engine, optimizer, timer, num_bad, steps_per_epoch)
    # A user's code is not run once more for this, as it may do anything.
    if topology.rank == 0 and not models.is_user_model(task.model):
        end = replace(end, flops_per_sample=flops.of_sample(spec, source.num_classes))
    logger.write(end)
    engine.close()
    log.info(f"done: {end.num_steps} steps, {end.num_samples} samples, records in {task.run_dir}")


def build_model(engine: Engine, build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Return a model with the task's first weights, equal on all ranks, and as it is prepared.

    Raises:
        RequestError: the engine cannot train it, or a checkpoint cannot hold it.
    """
    task = engine.task
    torch.manual_seed(task.seed)
    net = engine.deferred_build(build)
    if net is None:
        net = build()
        engine.check_model(net)
        process_group.broadcast_module(net)
        model_state.broadcast_extra(net)
        if task.save_interval:
            model_state.check_loadable(net)
    return net, engine.prepared(net)


def share_sequences(engine: Engine, spec: Any, net: nn.Module) -> Callable[[Any], Any]:
    """Have ranks compute with parts of sequences (`--cp`), and return what cuts a batch.

    Raises:
        RequestError: the model cannot.
    """
    shape = engine.mesh
    if shape.cp == 1:
        return lambda batch: batch
    group = RankGroup.of(shape.device_mesh(engine.device.type).get_group("cp"))
    return context_parallel.share_sequences(engine.task, spec, net, group, shape.tp)


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
