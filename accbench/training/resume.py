"""Going on from a checkpoint: which one, what it means for a run, and back into the engine."""

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
from accbench.distributed.process_group import Topology, from_rank0, gather_tensor
from accbench.engines import Engine
from accbench.engines.common import model_state, optimizer_state
from accbench.engines.common.training_state import NotLoadableError
from accbench.errors import RECORDS_BEFORE_VARIABLE, RequestError
from accbench.recording import records, run_folder
from accbench.recording.terminal import log
from accbench.training import checkpoint_file, checkpoints
from accbench.training.checkpoint_file import Checkpoint, DamagedError, Facts


def claimed(task: TaskConfig, say: Callable[[str], None]) -> TaskConfig:
    """The task, of a folder that is held, with `--resume` as the checkpoint's own folder.

    Raises:
        RequestError: there is none where one was named, or none is whole.
    """
    checkpoints.clean(task.run_dir)
    if task.resume is None:
        return task
    found = checkpoints.find(task.resume, task.run_dir, say)
    if found is None:
        say(f"no checkpoint in {task.run_dir} yet: training begins anew")
        path = task.run_dir / config.RECORDS_FILE
        if path.exists():
            records.append(path, records.ResumeRecord(step=0, epoch=0, checkpoint=None))
    else:
        say(f"going on from {found}")
    task = dataclasses.replace(task, resume=str(found) if found else None)
    try:
        run_folder.write(task)
    except OSError as error:
        raise RequestError(f"cannot write to {task.run_dir}: {error.strerror}") from None
    return task


def restarted(task: TaskConfig, say: Callable[[str], None]) -> TaskConfig:
    """Likewise for workers that are started again, from the newest checkpoint there is now."""
    of_its_own = checkpoints.steps_of(task.run_dir) or task.resume is None
    return claimed(dataclasses.replace(task, resume="auto" if of_its_own else task.resume), say)


def rejoined(task: TaskConfig, topology: Topology) -> TaskConfig:
    """The task of workers that were started again by a launcher of several nodes, on every rank.

    Raises:
        RequestError: on every rank, where no checkpoint is whole.
    """
    before = os.environ.get(RECORDS_BEFORE_VARIABLE)
    if before is None:
        return task
    told: tuple[str | None, str | None] = (task.resume, None)
    path = task.run_dir / config.RECORDS_FILE
    if topology.rank == 0 and path.exists() and path.stat().st_size > int(before):
        try:
            told = (restarted(task, log.info).resume, None)
        except RequestError as error:
            told = (None, str(error))
    found, problem = from_rank0(told)
    if problem is not None:
        raise RequestError(problem)
    return dataclasses.replace(task, resume=found)


class Keeper:
    """Reads the state of training into checkpoints, and puts one back.

    Args:
        net: what the engine's `prepare` was given.
        writer: on rank 0; None on the others, and where nothing is to be written.
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
    ) -> None:  # fmt: skip
        """Have a checkpoint written; all ranks call it, and training goes on while it is.

        Args:
            step: optimizer steps done.
            epoch: the one to go on with.
            num_batches: of that epoch, trained on in this process; None: none of it.
            scores: of the evaluation at this point, if there was one.
            num_samples: that all ranks have trained on.

        Raises:
            RequestError: the one before could not be written, and that is to end the run.
        """
        began = time.perf_counter()
        rng = self.engine.rng_state()
        by_name = {name: gather_tensor(state) for name, state in rng.items()}
        self.engine.gather_state()
        model_state.refuse_unsaved(self.net)
        if self.writer is not None:
            state = self.engine.training_state(self.net, self.optimizer)
            facts = Facts(
                step=step, epoch=epoch,
                loader=None if num_batches is None else self.loader.state_dict(num_batches),
                world_size=self.topology.world_size, engine=self.engine.task.engine,
                model=self.engine.task.model, seed=self.engine.task.seed,
                num_classes=self.num_classes, scaler=state.scaler,
                top1=None if scores is None else scores.top1,
                loss=None if scores is None else scores.loss,
                optimizer=self.engine.task.optimizer, image_size=self.engine.task.image_size,
                num_samples=num_samples,
            )  # fmt: skip
            of_ranks = tuple(
                {name: states[rank] for name, states in by_name.items()}
                for rank in range(self.topology.world_size)
            )
            self.writer.save(Checkpoint(facts, state, of_ranks), time.perf_counter() - began)
        self.engine.load_rng_state(rng)  # reading may have drawn, and a run that is not saved not

    def newest(self) -> Path | None:
        """The newest whole checkpoint of this run, on every rank."""
        found = None
        if self.topology.rank == 0:
            with contextlib.suppress(RequestError):
                found = checkpoints.find("auto", self.engine.task.run_dir, log.warning)
        path = from_rank0(None if found is None else str(found))
        return None if path is None else Path(path)

    def finish(self) -> None:
        """Wait until the last one is on the disk.

        Raises:
            RequestError: it could not be written, and that is to end the run.
        """
        if self.writer is not None:
            self.writer.finish()

    def restore(self, folder: Path) -> Facts:
        """Put a checkpoint back, on every rank.

        Raises:
            RequestError: it is of another model or of other data, or no longer whole.
        """
        try:
            saved = checkpoint_file.read(folder)
        except DamagedError as error:
            raise RequestError(f"--resume {folder}: {error}") from None
        facts, task = saved.facts, self.engine.task
        for what, then, now in (
            ("--model", facts.model, task.model), ("classes", facts.num_classes, self.num_classes),
            ("--optimizer", facts.optimizer, task.optimizer),
        ):  # fmt: skip
            if then != now:
                raise RequestError(f"--resume {folder}: it is of {what} {then}, and this is {now}")
        try:
            self.engine.load_training_state(
                self.net, self.optimizer, optimizer_state.with_averages(task, saved.state)
            )
            if facts.loader is not None:
                self.loader.load_state_dict(facts.loader)
        except (NotLoadableError, ValueError, KeyError) as error:
            raise RequestError(f"--resume {folder} does not fit: {error}") from None
        rank, world_size = self.topology.rank, self.topology.world_size
        # Anew, for another engine's checkpoint may lack a generator that this one has.
        self.engine.seed(task.seed + rank + _FAR * facts.step)
        if facts.world_size == world_size and rank < len(saved.rng):
            self.engine.load_rng_state(saved.rng[rank])
        else:
            were = f"saved by {facts.world_size} workers, now {world_size}"
            log.info(f"{were}: dropout and the like are drawn anew")
        return facts


# Seeds of ranks lie side by side; those of later steps must not fall among them.
_FAR = 1_000_003
