"""The check pass: hold one engine's training against a reference, part by part.

Each part writes the distances that it measures into the run's record. The twin for a user's script
is `script_check_pass`.
"""

import dataclasses
import zlib
from collections.abc import Generator
from contextlib import AbstractContextManager, closing
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accbench import models
from accbench.comparing import (
    distances,
    engine_dropout,
    merged_batches,
    rank_results,
    reference_pass,
    roundings,
    shared_dropout,
    update_rules,
)
from accbench.comparing.rank_share import RankShare
from accbench.comparing.reference_files import Reference
from accbench.config import TaskConfig, devices_per_worker
from accbench.distributed import process_group
from accbench.distributed.process_group import Topology
from accbench.engines import Batch, Engine
from accbench.engines.common import model_state
from accbench.engines.common.training_state import NotLoadableError, TrainingState
from accbench.errors import RequestError
from accbench.models.tasks import trainable
from accbench.recording import records
from accbench.recording.logger import RunLogger
from accbench.training import worker
from accbench.training.label_counts import LabelCounts
from accbench.training.opening import open_engine, open_first_engine
from accbench.training.train_loop import train_step

# A loss scale with which every float16 gradient overflows.
_OVERFLOWING_SCALE = 2.0**100
# The first step has no moments yet, the second has all. What an engine loaded wrongly in a later
# one would show as a wrong update.
_STEPS_READ_BACK = 2


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def run(
    task: TaskConfig, topology: Topology, reference_dir: Path, num_draws: int = 0,
    draws_free_run: bool = True,
) -> None:  # fmt: skip
    """Hold `task.engine` against a reference and record the distances.

    Args:
        task: the engine's task.
        topology: this worker's rank.
        reference_dir: the run folder of the reference.
        num_draws: how often to repeat each step from weights that are off by some roundings.
        draws_free_run: whether to repeat the free run as often; `draw_free_runs` can do it later.

    Raises:
        RequestError: there is no reference, or it is of another task.
    """
    check, source = _open(task, topology, reference_dir, num_draws, task.run_dir.name)
    try:
        with check.dropout_replaced():
            check.steps(source)
            check.evaluation(source)
            check.overflow(source)
            check.free_run()
            if draws_free_run:
                check.draw_free_runs()
    except NotLoadableError as error:  # on all ranks
        check.write("not loadable", 0, {}, note=str(error))
    check.dropout()
    check.end()


def draw_free_runs(
    task: TaskConfig, topology: Topology, reference_dir: Path, num_draws: int, floor: str
) -> None:
    """Repeat plain ddp's free run from weights that are off by some roundings.

    Args:
        task: the task of engine ddp.
        topology: this worker's rank.
        reference_dir: the run folder of the reference.
        num_draws: how often to repeat it.
        floor: the name of the folder of plain ddp's pass, which the draws belong to.

    Raises:
        RequestError: there is no reference, or it is of another task.
    """
    check, _ = _open(task, topology, reference_dir, num_draws, floor)
    with shared_dropout.shared_dropout():
        for step in range(check.num_steps):
            check.reference.read(step)
        check.draw_free_runs()
    check.end()


def _open(
    task: TaskConfig, topology: Topology, reference_dir: Path, num_draws: int, name: str
) -> "tuple[CheckPass, Any]":
    """Open engine, reference and data source, and build the model."""
    assert task.max_steps is not None
    logger = RunLogger(task.run_dir, topology.rank)
    engine = open_first_engine(task, topology)
    shape, data = engine.mesh, engine.mesh.data_topology(topology)
    reference = Reference(reference_dir, update_rules.of_task(task), data.rank)
    facts = reference.facts
    made_for = (facts.batch_size, len(facts.losses), len(facts.losses[0]), facts.workers_per_batch)
    num_devices = devices_per_worker(task)  # each computes what a rank of plain ddp does
    assert task.batch_size is not None
    if made_for != (
        task.batch_size // num_devices, task.max_steps, shape.num_data_ranks * num_devices,
        shape.num_workers_per_batch,
    ) or facts.is_undropped != (num_devices > 1):  # fmt: skip
        raise RequestError(f"the reference in {reference_dir} is of another task")
    (source,) = merged_batches.sources(task, [data], shape.num_workers_per_batch * num_devices)
    logger.write(worker.run_record(task, engine, topology, source.num_classes))
    engine.strategy.prove()
    check = CheckPass(task, topology, engine, reference, logger, num_draws, name)
    check.build(source)
    return check, source


class CheckPass:
    """One engine's check pass: the parts of it, which `run` calls in their order."""

    def __init__(
        self, task: TaskConfig, topology: Topology, engine: Engine, reference: Reference,
        logger: RunLogger, num_draws: int, name: str,
    ) -> None:  # fmt: skip
        """Prepare the pass.

        Args:
            task: the engine's task.
            topology: this worker's rank.
            engine: the engine to check.
            reference: what to hold it against.
            logger: the run's record.
            num_draws: how often to repeat each step, to measure the effect of rounding in it.
            name: part of the seed of the draws, which differ from pass to pass.
        """
        self.num_draws, self.name = num_draws, name
        self.data = engine.mesh.data_topology(topology)
        self.task, self.topology, self.engine = task, topology, engine
        self.reference, self.logger = reference, logger
        self.spec = models.of_task(task)
        shapes = [tuple(shape) for shape in reference.facts.dropout_shapes]
        self.draws = shared_dropout.Draws(task.seed, shapes)
        assert task.max_steps is not None
        self.num_steps = task.max_steps

    def build(self, source: Any) -> None:
        """Build the model and its optimizer as training does, and compare the initial weights."""
        torch.manual_seed(self.task.seed)
        self.net: nn.Module = trainable.plain(self.spec.build(source.num_classes))
        self.engine.check_model(self.net)
        process_group.broadcast_module(self.net)
        model_state.broadcast_extra(self.net)
        self.model = self.engine.prepared(self.net)
        self.optimizer = self.engine.build_optimizer(self.model)
        tokens = self.engine.mesh.of_gradients.data_topology(self.topology)
        self.engine.seed(self.task.seed + tokens.rank)
        self.transform = worker.share_sequences(self.engine, self.spec, self.net)
        self.labels = LabelCounts(self.engine, self.spec, source)
        self.model.train()
        state = self.engine.training_state(self.net, self.optimizer)
        self.write("start", 0, distances.of_start(state, self.reference.start_state))
        if not self.drops and self.reference.facts.dropout_probabilities:
            self.write("without dropout", 0, {})

    @property
    def drops(self) -> bool:
        """Tell whether dropout drops what the reference drops, rather than nothing."""
        return self.reference.facts.drops

    @property
    def _reference_ranks(self) -> slice:
        """The reference's ranks of which this one has the batches."""
        num_devices = devices_per_worker(self.task)
        return slice(self.data.rank * num_devices, (self.data.rank + 1) * num_devices)

    def dropout_replaced(self) -> AbstractContextManager[None]:
        """Return a context in which dropout is the reference's."""
        return shared_dropout.shared_dropout(self.drops)

    def steps(self, source: Any) -> None:
        """Check every step, each from the reference's state."""
        batches = self._batches(source)
        with closing(batches):
            for step, batch in enumerate(islice(batches, self.num_steps)):
                self.reference.read(step)
                self._load(self.reference.state, is_read_back=step < _STEPS_READ_BACK)
                self._draw(step)
                loss = self._step(batch)
                self.engine.wait()
                state = self.engine.training_state(self.net, self.optimizer)
                num_apart = self._count_apart(state)
                share = None if num_apart else self._share_of(state)
                step_distances = {
                    "loss": self._of_loss(loss, step),
                    "dropout calls": float(self.draws.num_others()),
                    **distances.of_step(state, self.reference, share),
                }
                self.write("step", step + 1, step_distances, loss=loss, num_apart=num_apart)
                self._draws_of_step(step, batch)

    def _draws_of_step(self, step: int, batch: Batch) -> None:
        for draw in range(self.num_draws):
            self._load_perturbed(self.reference.state, step, draw)
            self._draw(step)
            with roundings.norms_with_xla_variance(self.engine.precision.autocast_dtype):
                loss = self._step(batch)
            self.engine.wait()
            perturbed_state = self.engine.training_state(self.net, self.optimizer)
            share = self._share_of(perturbed_state)
            noise = distances.of_draw(perturbed_state, self.reference, share)
            self.write("noise", step + 1, {"loss": self._of_loss(loss, step), **noise})

    def _load_perturbed(self, state: TrainingState, step: int, draw: int) -> None:
        """Load a state whose weights are perturbed by some roundings.

        Each pass perturbs them differently, as there are two floors. The caller has loaded the
        exact state before, so that it is known to be loadable.
        """
        name = f"{self.name} {self.task.seed} {step} {draw}"
        weights = {n: state.model[n] for n in self.reference.weights.parameters}
        dtype = self.engine.precision.autocast_dtype
        weights = roundings.perturbed(weights, dtype, zlib.crc32(name.encode()))
        state = dataclasses.replace(state, model={**state.model, **weights})
        self.engine.load_training_state(self.net, self.optimizer, state)

    def evaluation(self, source: Any) -> None:
        """Score the first batch with the weights after the last step."""
        self._load(self.reference.state_after)
        problem, distance = None, 0.0
        try:
            distance = distances.relative(self._score(source), self._expected_score)
        except Exception as error:  # a failed evaluation says nothing about its training
            problem = f"it could not evaluate: {_one_line(error)}"
        problem = rank_results.joined(problem, "could not evaluate")
        self.write("evaluation", self.num_steps, {"loss": distance}, note=problem)
        for draw in range(0 if problem else 2 * self.num_draws):
            self._load_perturbed(self.reference.state_after, self.num_steps, draw)
            distance = distances.relative(self._score(source), self._expected_score)
            self.write("noise of evaluation", self.num_steps, {"loss": distance})

    @property
    def _expected_score(self) -> float:
        return sum(self.reference.facts.scores[self._reference_ranks])

    def _score(self, source: Any) -> float:
        batches = self._batches(source)
        with closing(batches), torch.no_grad():
            batch = next(batches)
            self.model.eval()
            try:
                scores = self.engine.run_score(self.model, self.spec, batch)
                self.engine.end_step()
                self.engine.wait()
            finally:
                self.model.train()
        return self.engine.mesh.cp * self._of_batch(float(scores.cpu()[0].item()))

    def overflow(self, source: Any) -> None:
        """Check that an overflowing float16 step halves the loss scale and changes no weight."""
        before = self.reference.state_after
        if not self.engine.training_state(self.net, self.optimizer).scaler:
            return
        scaler = {"scale": _OVERFLOWING_SCALE, "growth_tracker": 0.0}
        loaded = TrainingState(before.model, before.optimizer, scaler)
        self._load(loaded)
        self._draw(0)
        batches = self._batches(source)
        with closing(batches):
            self._step(next(batches))
        self.engine.wait()
        state = self.engine.training_state(self.net, self.optimizer)
        self.write("overflow", self.num_steps, distances.of_skipped_step(state, loaded))

    def free_run(self) -> None:
        """Check as many steps from the start, with nothing loaded or read between them."""
        self._load(self.reference.start_state)
        self._train_freely("free")

    def draw_free_runs(self) -> None:
        """Repeat the free run from weights that are off by some roundings."""
        for draw in range(self.num_draws):
            self._load_perturbed(self.reference.start_state, self.num_steps + 1, draw)
            with roundings.norms_with_xla_variance(self.engine.precision.autocast_dtype):
                self._train_freely("noise of free")

    def _train_freely(self, phase: str) -> None:
        batches = self._batches(self._open_source())
        losses = []
        with closing(batches):
            for step, batch in enumerate(islice(batches, self.num_steps)):
                self._draw(step)
                losses.append(self._run_step(batch))
        self.engine.wait()
        state = self.engine.training_state(self.net, self.optimizer)
        for step, tensor in enumerate(losses):
            loss = self._of_batch(float(tensor.cpu().item()))
            self.write(phase, step + 1, {"loss": self._of_loss(loss, step)}, loss=loss)
        end = distances.of_free_run(state, self.reference)
        num_apart = self._count_apart(state)
        self.write(f"{phase} end", self.num_steps, end, num_apart=num_apart)

    def dropout(self) -> None:
        """Check that the dropout masks which the engine draws itself are random."""
        probabilities = self.reference.facts.dropout_probabilities
        if not probabilities:
            return
        batches = self._batches(self._open_source())
        problem, not_tried = None, None
        with closing(batches):
            try:
                # A new engine, as this one may have compiled the shared dropout in. The mask is
                # read from a gradient, which must not be clipped, and has no plans to be cut by.
                unclipped = dataclasses.replace(
                    self.task, clip_norm=None, accumulate=1, tp=1, sequence_parallel=False, cp=1,
                    cp_attention="ulysses", pp=1, pp_schedule=None,
                )  # fmt: skip
                problem = engine_dropout.find_problem(
                    open_engine(unclipped, self.topology), self.topology, train_step,
                    next(batches), probabilities, self.task.seed,
                )  # fmt: skip
            except Exception as error:
                # An engine may run only its own kind of model; everything else has been checked.
                not_tried = f"its own dropout could not be tried: {_one_line(error)}"
        problem = rank_results.joined(problem, "drops otherwise than at random")
        not_tried = rank_results.joined(not_tried, "could not try its own dropout")
        num_problems = {"problems": float(problem is not None)}
        self.write("own dropout", self.num_steps, num_problems, note=problem or not_tried)

    def end(self) -> None:
        """End the record and close the engine."""
        self.logger.write(records.EndRecord("ok", num_steps=self.num_steps))
        self.engine.close()

    def _batches(self, source: Any) -> Generator[Batch, None, None]:
        loader = source.train_loader()
        loader.transform = self.transform
        return reference_pass.epochs(loader, self.labels.device_batches)

    def _open_source(self) -> Any:
        num = self.engine.mesh.num_workers_per_batch * devices_per_worker(self.task)
        (source,) = merged_batches.sources(self.task, [self.data], num)
        return source

    def _draw(self, step: int) -> None:
        self.draws.begin(step, self.data.rank, lambda t: self.engine.to_device((t,))[0])

    def _step(self, batch: Batch) -> float:
        return self._of_batch(float(self._run_step(batch).cpu().item()))

    def _of_batch(self, value: float) -> float:
        """Return the mean of a value over this rank's batch, of which `--cp` leaves it a part."""
        shape = self.engine.mesh
        if shape.cp == 1:
            return value
        values = [rank_value for (rank_value,) in process_group.all_gather_values([value])]
        topologies = [dataclasses.replace(self.topology, rank=rank) for rank in range(len(values))]
        shared = [
            rank_value
            for rank_value, topology in zip(values, topologies, strict=True)
            if shape.data_topology(topology).rank == self.data.rank
        ]
        return sum(shared) / len(shared)

    def _run_step(self, batch: Batch) -> torch.Tensor:
        return self.engine.run_step(train_step, self.model, self.spec, self.optimizer, batch)

    def _load(self, state: TrainingState, is_read_back: bool = True) -> None:
        """Load a state, or raise on all ranks, so that none waits for another.

        Args:
            state: what to load.
            is_read_back: whether to hold what the engine then has against it.

        Raises:
            NotLoadableError: a rank could not load the state.
        """
        problem = None
        try:
            self.engine.load_training_state(self.net, self.optimizer, state)
            if is_read_back:
                loaded = self.engine.training_state(self.net, self.optimizer)
                problem = distances.not_loaded(loaded, state)
        except NotLoadableError as error:
            problem = str(error)
        rank_results.raise_together(problem, "did not take over its state")

    def _of_loss(self, loss: float, step: int) -> float:
        losses = self.reference.facts.losses[step][self._reference_ranks]
        return distances.relative(loss, sum(losses) / len(losses))

    def write(
        self, phase: str, step: int, measured: dict[str, float], note: str | None = None,
        loss: float | None = None, num_apart: int = 0,
    ) -> None:  # fmt: skip
        """Record distances, the largest of any rank; all ranks call this."""
        rank_results.write(self.logger, phase, step, measured, note, loss, num_apart)

    def _count_apart(self, state: TrainingState) -> int:
        names = self.reference.start.parameters.keys() & state.model.keys()
        return rank_results.count_apart(state.model, names)

    def _share_of(self, state: TrainingState) -> RankShare | None:
        if self.topology.world_size == 1:
            return None
        sizes = {name: p.numel() for name, p in self.reference.weights.parameters.items()}
        return RankShare.of_equal(state, sizes, self.topology.rank, process_group.all_gather_values)
