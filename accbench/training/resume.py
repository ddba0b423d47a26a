"""Resuming from a checkpoint: choosing it, and restoring it into the engine."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accbench import config
from accbench.config import TaskConfig
from accbench.distributed.process_group import (
    Topology,
    all_gather_tensor,
    all_gather_values,
    broadcast_value,
)
from accbench.engines import Engine
from accbench.engines.common import model_state, optimizer_state
from accbench.engines.common.training_state import NotLoadableError
from accbench.errors import RECORDS_BEFORE_VARIABLE, RequestError
from accbench.recording import records, run_folder
from accbench.recording.terminal import log
from accbench.training import checkpoint_file, checkpoints
from accbench.training.checkpoint_file import Checkpoint, CheckpointFacts, DamagedError


def with_checkpoint(task: TaskConfig, say: Callable[[str], None]) -> TaskConfig:
    """Return the task with `--resume` replaced by the path of the checkpoint; writes it down.

    The caller holds the run's folder.

    Raises:
        RequestError: the named checkpoint does not exist, it is of another run, which leaves the
            folder as it was, or none is complete.
    """
    checkpoints.clean(task.run_dir)
    if task.resume is None:
        return task
    checkpoint = _find(task, say)
    if checkpoint is None:
        say(f"no checkpoint in {task.run_dir} yet: training starts from the beginning")
        path = task.run_dir / config.RECORDS_FILE
        if path.exists():
            records.append(path, records.ResumeRecord(step=0, epoch=0, checkpoint=None))
    else:
        say(f"going on from {checkpoint}")
    task = dataclasses.replace(task, resume=str(checkpoint) if checkpoint else None)
    _write_down(task)
    return task


def with_checkpoint_later(task: TaskConfig, say: Callable[[str], None]) -> None:
    """Write down a task of `--resume auto` whose checkpoint a job chooses when it starts.

    The caller holds the run's folder.

    Raises:
        RequestError: the newest checkpoint is of another run, or none is complete.
    """
    _find(task, say)
    _write_down(task)


def _find(task: TaskConfig, say: Callable[[str], None]) -> Path | None:
    assert task.resume is not None
    checkpoint = checkpoints.find(task.resume, task.run_dir, say)
    if checkpoint is not None:
        options = task.options.get(config.data_name(task.data)[0])
        refuse_other(checkpoint, task, getattr(options, "num_classes", None) or None, None)
    return checkpoint


def refuse_other(
    checkpoint: Path, task: TaskConfig, num_classes: int | None, num_samples: int | None
) -> None:
    """Compare a checkpoint's facts with the task; what is None on either side is not compared.

    Args:
        checkpoint: its folder.
        task: the task that is to go on from it.
        num_classes: classes of the data.
        num_samples: samples of the training data.

    Raises:
        RequestError: it is of another model, optimizer, seed or of other data, or is damaged.
    """
    try:
        facts = checkpoint_file.read_facts(checkpoint)
    except DamagedError as error:
        raise RequestError(f"--resume {checkpoint}: {error}") from None
    for what, then, now in (
        ("--model", facts.model, task.model), ("classes", facts.num_classes, num_classes),
        ("--optimizer", facts.optimizer, task.optimizer), ("--seed", facts.seed, task.seed),
        ("--data", facts.data, config.data_name(task.data)[0]),
        ("training samples", facts.num_train_samples, num_samples),
    ):  # fmt: skip
        if None not in (then, now) and then != now:
            raise RequestError(f"--resume {checkpoint}: it is of {what} {then}, and this is {now}")


def _write_down(task: TaskConfig) -> None:
    try:
        run_folder.write(task)
    except OSError as error:
        raise RequestError(f"cannot write to {task.run_dir}: {error.strerror}") from None


def with_newest_checkpoint(task: TaskConfig, say: Callable[[str], None]) -> TaskConfig:
    """Return the task for workers that are started again, from the newest checkpoint."""
    has_own = checkpoints.steps_of(task.run_dir) or task.resume is None
    return with_checkpoint(
        dataclasses.replace(task, resume="auto" if has_own else task.resume), say
    )


def rejoin(task: TaskConfig, topology: Topology) -> TaskConfig:
    """Return, on every rank, the task of workers that a launcher of several nodes restarted.

    Raises:
        RequestError: on every rank, if no checkpoint is complete.
    """
    before = os.environ.get(RECORDS_BEFORE_VARIABLE)
    if before is None:
        return task
    resume_and_problem: tuple[str | None, str | None] = (task.resume, None)
    path = task.run_dir / config.RECORDS_FILE
    if topology.rank == 0 and path.exists() and path.stat().st_size > int(before):
        try:
            resume_and_problem = (with_newest_checkpoint(task, log.info).resume, None)
        except RequestError as error:
            resume_and_problem = (None, str(error))
    resume, problem = broadcast_value(resume_and_problem)
    if problem is not None:
        raise RequestError(problem)
    return dataclasses.replace(task, resume=resume)


class Keeper:
    """Writes the state of training into checkpoints, and restores it.

    Args:
        engine: the engine that trains.
        net: the model that the engine prepared.
        optimizer: its optimizer.
        loader: the training loader.
        num_classes: number of classes of the data.
        topology: this worker's rank.
        writer: writes on rank 0; None on the others, and if nothing is to be written.
    """

    def __init__(
        self, engine: Engine, net: nn.Module, optimizer: torch.optim.Optimizer, loader: Any,
        num_classes: int, topology: Topology, writer: checkpoints.Writer | None,
    ) -> None:  # fmt: skip
        self.engine, self.net, self.optimizer, self.loader = engine, net, optimizer, loader
        self.num_classes, self.topology, self.writer = num_classes, topology, writer

    def save(
        self, step: int, epoch: int, num_batches: int | None = None,
        scores: records.EvalRecord | None = None, num_samples: int | None = None,
        epochs_trained: float | None = None,
    ) -> None:  # fmt: skip
        """Start writing a checkpoint; all ranks call it, and training goes on meanwhile.

        Args:
            step: optimizer steps done.
            epoch: the epoch to go on with.
            num_batches: batches of that epoch that this process has trained on; None for none.
            scores: scores of the evaluation at this point, if there was one.
            num_samples: samples that all ranks have trained on.
            epochs_trained: epochs that the learning rate's schedule has gone through.

        Raises:
            RequestError: the checkpoint before could not be written, and that ends the run.
        """
        began = time.perf_counter()
        rng = self.engine.rng_state()
        by_name = {name: all_gather_tensor(state) for name, state in rng.items()}
        self.engine.gather_state()
        model_state.refuse_unsaved(self.net)
        if self.writer is not None or self.engine.reads_together:
            state = self.engine.saved_state(self.net, self.optimizer)
            facts = CheckpointFacts(
                step=step, epoch=epoch,
                loader=None if num_batches is None else self.loader.state_dict(num_batches),
                world_size=self.topology.world_size, engine=self.engine.task.engine,
                model=self.engine.task.model, seed=self.engine.task.seed,
                num_classes=self.num_classes, scaler=state.scaler,
                top1=None if scores is None else scores.top1,
                loss=None if scores is None else scores.loss,
                optimizer=self.engine.task.optimizer, image_size=self.engine.task.image_size,
                num_samples=num_samples, num_token_ranks=self.engine.mesh.num_token_ranks,
                num_pp_ranks=self.engine.mesh.pp, epochs_trained=epochs_trained,
                data=config.data_name(self.engine.task.data)[0],
                num_train_samples=self._num_train_samples(),
            )  # fmt: skip
            rng_of_ranks = tuple(
                {name: states[rank] for name, states in by_name.items()}
                for rank in range(self.topology.world_size)
            )
            self._write(Checkpoint(facts, state, rng_of_ranks), time.perf_counter() - began)
        self.engine.load_rng_state(
            rng
        )  # reading may have drawn numbers; a run without checkpoints would not

    def _write(self, checkpoint: Checkpoint, stall_s: float) -> None:
        """Write a checkpoint on rank 0; a sharded one at once, as all ranks gather for it."""
        try:
            if self.writer is not None:
                self.writer.save(checkpoint, stall_s, at_once=self.engine.reads_together)
        finally:
            if self.engine.reads_together:
                checkpoint_file.gather_rest(checkpoint)

    def _num_train_samples(self) -> int | None:
        number: int | None = self.loader.state_dict(0).get("num_total")
        return number

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint of this run, on every rank."""
        newest = None
        if self.topology.rank == 0:
            with contextlib.suppress(RequestError):
                newest = checkpoints.find("auto", self.engine.task.run_dir, log.warning)
        path = broadcast_value(None if newest is None else str(newest))
        return None if path is None else Path(path)

    def finish(self) -> None:
        """Wait until the last checkpoint is on the disk.

        Raises:
            RequestError: it could not be written, and that ends the run.
        """
        if self.writer is not None:
            self.writer.finish()

    def restore(self, folder: Path) -> CheckpointFacts:
        """Restore a checkpoint, on every rank, and set those after it in the run's folder aside.

        Raises:
            RequestError: it is of another model or of other data, or is damaged.
        """
        refuse_other(folder, self.engine.task, self.num_classes, self._num_train_samples())
        try:
            saved = checkpoint_file.read(folder, by_rows=self.engine.reads_together)
        except DamagedError as error:
            raise RequestError(f"--resume {folder}: {error}") from None
        facts, task = saved.facts, self.engine.task
        try:
            self.engine.load_training_state(
                self.net, self.optimizer, optimizer_state.with_averages(task, saved.state)
            )
            if facts.loader is not None:
                self.loader.load_state_dict(facts.loader)
        except (NotLoadableError, ValueError, KeyError) as error:
            raise RequestError(f"--resume {folder} does not fit: {error}") from None
        rank, world_size = self.topology.rank, self.topology.world_size
        # Seed first: another engine's checkpoint may lack a generator that this one has.
        data = self.engine.mesh.of_gradients.data_topology(self.topology)
        self.engine.seed(task.seed + data.rank + _SEED_STRIDE * facts.step)
        num_token_ranks = facts.num_token_ranks or facts.world_size
        # Ranks with one batch draw the same numbers unless they are stages, so those of another
        # mesh do not fit.
        is_same = (facts.world_size, num_token_ranks) == (world_size, data.world_size)
        is_same = is_same and facts.num_pp_ranks == self.engine.mesh.pp
        if is_same and rank < len(saved.rng):
            self.engine.load_rng_state(saved.rng[rank])
        else:
            change = (
                f"saved by {facts.world_size} workers of which {num_token_ranks} had tokens of "
                f"their own, now {world_size} and {data.world_size}"
                if facts.world_size == world_size
                else f"saved by {facts.world_size} workers, now {world_size}"
            )
            if facts.num_pp_ranks != self.engine.mesh.pp:
                change += f", in stages over {facts.num_pp_ranks} and now {self.engine.mesh.pp}"
            log.info(f"{change}: dropout and the like draw new random numbers")
        self._set_later_aside(facts.step)
        return facts

    def _set_later_aside(self, step: int) -> None:
        """Set checkpoints of a training that this one abandons aside, before it saves its own.

        By their steps they would count as newer than those to come.
        """
        all_gather_values([0.0])  # waits until no rank can refuse the checkpoint any more
        if self.writer is None:
            return
        try:
            aside = checkpoints.set_later_aside(self.writer.run_dir, step)
        except OSError as error:
            raise RequestError(
                f"cannot set the checkpoints after step {step} in {self.writer.run_dir} aside: "
                f"{error.strerror}; resume into another --output_dir"
            ) from None
        if aside is not None:
            log.info(f"the checkpoints after step {step} count no more; they are in {aside}")


# Ranks have consecutive seeds; seeds after later steps must not coincide with them.
_SEED_STRIDE = 1_000_003
