"""The loop over epochs: train, evaluate, save, stop on request, and resume."""

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from accbench.distributed import process_group
from accbench.engines import Engine
from accbench.errors import NonFiniteLossError, StoppedError
from accbench.logger import RunLogger
from accbench.recording.records import EvalRecord, ResumeRecord
from accbench.recording.terminal import TrainingDisplay, log
from accbench.training import checkpoints
from accbench.training.checkpoint_file import CheckpointFacts
from accbench.training.label_counts import LabelCounts
from accbench.training.profile import StepProfile
from accbench.training.resume import Keeper
from accbench.training.schedule import Schedule
from accbench.training.step_timer import StepTimer
from accbench.training.stopping import StopRequests
from accbench.training.train_loop import evaluate, train_epoch


@dataclasses.dataclass
class Epochs:
    """One run's loop over its epochs."""

    engine: Engine
    model: nn.Module
    spec: Any
    optimizer: torch.optim.Optimizer
    train_loader: Any
    eval_loader: Any | None
    labels: LabelCounts
    timer: StepTimer
    keeper: Keeper
    logger: RunLogger
    display: TrainingDisplay
    steps_per_epoch: int

    def __post_init__(self) -> None:
        self.task = self.engine.task
        self.first_epoch = 0
        # The epoch to go on with, and how many of its batches this process has done.
        self._at: tuple[int, int | None] = (0, None)
        self._at_step = 0
        self._saved_step: int | None = None
        self._scores: EvalRecord | None = None
        """The scores of the weights as they are after the last epoch."""
        # Steps that the schedule is ahead of the run's.
        self._schedule_lead = 0
        self._is_unscored = False
        self._stops: StopRequests | None = None
        self._profile = (
            StepProfile(self.engine, self.timer, self.task.profile) if self.task.profile else None
        )

    def restore(self) -> None:
        """Restore the checkpoint of `--resume`, if there is one.

        Raises:
            RequestError: the checkpoint does not fit.
        """
        if self.task.resume is None:
            return
        facts = self.keeper.restore(Path(self.task.resume))
        self.first_epoch = facts.epoch
        self._go_on_from(facts)
        self._at = facts.epoch, None if facts.loader is None else 0
        is_after_epoch = facts.loader is None and facts.epoch > 0
        self._is_unscored = is_after_epoch and facts.loss is None and facts.top1 is None
        if Path(self.task.resume) == checkpoints.folder_of(self.task.run_dir, facts.step):
            self._saved_step = facts.step
        self.logger.write(ResumeRecord(facts.step, facts.epoch, self.task.resume))

    def run(self) -> None:
        """Train until `--epochs` or `--max_steps`.

        Raises:
            StoppedError: on all ranks, when one of them was asked to stop; the state is saved.
        """
        self._start_schedule()
        rank = self.engine.topology.rank
        # Without checkpoints, a signal ends the process as usual.
        stops = (
            StopRequests(self.task.timeout_s, self.task.run_dir, rank)
            if self.task.save_interval
            else contextlib.nullcontext()
        )
        with stops as self._stops:
            self._evaluate_where_it_was_stopped()
            num_rollbacks, epoch = 0, self.first_epoch
            while epoch < self.task.epochs and not self._is_done():
                try:
                    self._run_epoch(epoch)
                    epoch += 1
                except NonFiniteLossError as error:
                    if self.task.on_nan == "stop" or num_rollbacks == self.task.max_rollbacks:
                        raise
                    num_rollbacks += 1
                    self._roll_back(error)
            self._save()
        if self._profile is not None:
            self._profile.finish()
        self.keeper.finish()

    def _is_done(self) -> bool:
        return self.task.max_steps is not None and self.timer.num_steps >= self.task.max_steps

    def _run_epoch(self, epoch: int) -> None:
        with self.display.report_long_steps(self.engine.compiler):
            is_complete = train_epoch(
                self.engine, self.model, self.spec, self.optimizer, self.train_loader, self.labels,
                self.timer, epoch, self._after_step,
            )  # fmt: skip
        if not is_complete:
            return
        number = epoch + 1
        self._at = number, None
        if self._is_to_evaluate_after(number):
            self._note_scores(self._evaluate(epoch))
        if self.task.save_interval and number % self.task.save_interval == 0:
            self._save()

    def _is_to_evaluate_after(self, num_epochs: int) -> bool:
        # The loader itself is false on a rank that has no sample.
        has_samples, interval = self.eval_loader is not None, self.task.eval_interval
        return has_samples and interval > 0 and num_epochs % interval == 0

    def _evaluate(self, epoch: int) -> EvalRecord:
        """Evaluate, and return the scores of the averaged weights if there are any.

        Raises:
            StoppedError: on all ranks, when one of them was asked to stop; the state is saved.
        """
        self.engine.share_buffers(self.keeper.net)
        models = [self.model]
        if self.task.ema_decay:
            models.append(self.engine.averaged_model(self.keeper.net, self.optimizer))
        for model in models:
            found = evaluate(
                self.engine, model, self.spec, self.eval_loader, epoch, self._is_stopped
            )
            if found is None:
                assert self._stops is not None
                self._stop(self._stops)
            scores = dataclasses.replace(found, averaged=model is not self.model)
            self.logger.write(scores)
            self.display.evaluation(scores)
        return scores

    def _is_stopped(self) -> bool:
        """Return whether to stop an evaluation before its next batch."""
        if self._stops is None:
            return False
        if self.engine.evaluates_together:
            return self._stops.agreed()
        # Workers that share a batch wait for each other in it, and evaluate to the end.
        return self.engine.mesh.num_workers_per_batch == 1 and self._stops.received

    def _evaluate_where_it_was_stopped(self) -> None:
        """Evaluate after the epoch that was restored, if a stop has cut that short."""
        if self._is_unscored and self._is_to_evaluate_after(self.first_epoch):
            self._note_scores(self._evaluate(self.first_epoch - 1))
            self._save()

    def _note_scores(self, scores: EvalRecord) -> None:
        self._scores, self._saved_step = scores, None  # a checkpoint of this step lacks them

    def _after_step(self, num_batches: int) -> None:
        self._at, self._at_step = (self.timer.epoch, num_batches), self.timer.num_steps
        self._scores = None
        self._schedule.step()
        if self._profile is not None:
            self._profile.after_step()
        if self._stops is not None and self._stops.agreed():
            self._stop(self._stops)
        every = self.task.save_steps
        if every is not None and self.timer.num_steps % every == 0:
            self.timer.close_window()
            self._save()
            self.timer.start(self.timer.epoch)

    def _roll_back(self, error: NonFiniteLossError) -> None:
        """Load the newest checkpoint's weights, and go on after the data that caused the error.

        Raises:
            NonFiniteLossError: `error`, if there is no checkpoint.
        """
        epoch, num_batches = self._at
        bad_step = self.timer.num_steps
        # `_after_step` is not called for a step whose window ended with an error.
        loader_state = self.train_loader.state_dict((num_batches or 0) + bad_step - self._at_step)
        self.keeper.finish()
        folder = self.keeper.newest()
        if folder is None:
            raise error
        facts = self.keeper.restore(folder)
        self.train_loader.load_state_dict(loader_state)
        self._at = epoch, 0
        self._go_on_from(facts)
        self._saved_step = facts.step
        self._start_schedule()
        log.warning(
            f"{error}; back to the weights after step {facts.step}, and on behind the "
            f"{bad_step - facts.step} steps' data since then"
        )
        self.logger.write(ResumeRecord(facts.step, epoch, str(folder), rolled_back=True))

    def _go_on_from(self, facts: CheckpointFacts) -> None:
        self.timer.num_steps = self._at_step = facts.step
        # Steps were as long as now, unless the number of workers or the batch size has changed.
        if facts.epochs_trained is not None:
            self._schedule_lead = round(facts.epochs_trained * self.steps_per_epoch) - facts.step
        num_samples = facts.num_samples
        if num_samples is None:
            assert self.engine.task.batch_size is not None
            num_samples = facts.step * self.engine.task.batch_size * facts.world_size
        self.timer.num_earlier_samples = 0
        self.timer.num_earlier_samples = num_samples - self.timer.num_samples_of_all

    def _start_schedule(self) -> None:
        self.display.set_num_steps(self._num_steps())
        self._schedule = Schedule(
            self.optimizer, self.task, self.steps_per_epoch,
            self._num_steps() + self._schedule_lead, self.timer.num_steps + self._schedule_lead,
        )  # fmt: skip

    def _num_steps(self) -> int:
        """Return the optimizer steps of the whole run; earlier ones may have been longer."""
        of_epochs = self.task.epochs * self.steps_per_epoch - self._schedule_lead
        return min(self.task.max_steps or sys.maxsize, of_epochs)

    def _save(self) -> None:
        """Save a checkpoint, with the scores of its weights if there are any; each step once."""
        if self._saved_step == self.timer.num_steps or not self.task.save_interval:
            return
        self.keeper.save(
            self.timer.num_steps, *self._at, self._scores, self.timer.num_samples_of_all,
            (self.timer.num_steps + self._schedule_lead) / self.steps_per_epoch,
        )  # fmt: skip
        self._saved_step = self.timer.num_steps

    def _stop(self, stops: StopRequests) -> NoReturn:
        self.timer.close_window()
        self._save()
        self.keeper.finish()
        # The collective also keeps each rank until all is on the disk: the first one to leave would
        # make its launcher end the others.
        flags = process_group.all_gather_values([float(stops.received)])
        ranks = ", ".join(str(rank) for rank, (is_set,) in enumerate(flags) if is_set)
        raise StoppedError(
            f"stopped after step {self.timer.num_steps}, as rank {ranks} was asked to; all is "
            "saved, go on with --resume auto"
        )
