"""One engine's numerics pass, part by part; each writes what it found into the record."""

import dataclasses
import zlib
from collections.abc import Generator
from contextlib import closing
from itertools import islice
from typing import Any

import torch
from torch import nn

from accbench import models
from accbench.comparing import distances, dropout, reference, roundings
from accbench.comparing.own_dropout import own_dropout
from accbench.comparing.reference import Reference
from accbench.config import TaskConfig
from accbench.distributed import process_group
from accbench.distributed.process_group import Topology
from accbench.engines import Batch, Engine
from accbench.engines.common import model_state
from accbench.engines.common.training_state import NotLoadableError, TrainingState
from accbench.models.tasks import trainable
from accbench.recording import records
from accbench.recording.logger import RunLogger
from accbench.training.opening import engine_of
from accbench.training.train_loop import train_step

# A loss scale with which every float16 gradient overflows.
_OVERFLOWING_SCALE = 2.0**100


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


class Examination:
    """One engine's pass."""

    def __init__(
        self, task: TaskConfig, topology: Topology, engine: Engine, against: Reference,
        logger: RunLogger, num_draws: int = 0,
    ) -> None:  # fmt: skip
        """`num_draws`: how often to do each step again, to see what rounding does in it."""
        self.num_draws = num_draws
        self.task, self.topology, self.engine = task, topology, engine
        self.against, self.logger = against, logger
        self.spec = models.of_task(task)
        self.draws = dropout.Draws(task.seed, [tuple(s) for s in against.facts.dropout_shapes])
        assert task.max_steps is not None
        self.num_steps = task.max_steps

    def build(self, num_classes: int) -> None:
        """The model and its optimizer, as in training."""
        torch.manual_seed(self.task.seed)
        self.net: nn.Module = trainable.plain(self.spec.build(num_classes))
        self.engine.check_model(self.net)
        process_group.broadcast_module(self.net)
        model_state.broadcast_extra(self.net)
        self.model = self.engine.prepared(self.net)
        self.optimizer = self.engine.build_optimizer(self.model)
        self.engine.seed(self.task.seed + self.topology.rank)
        self.model.train()
        own = self.engine.training_state(self.net, self.optimizer)
        self.write("start", 0, distances.of_start(own, self.against.start_state))

    def steps(self, source: Any) -> None:
        """Every step from the reference's state."""
        batches = self._batches(source)
        with closing(batches):
            for step, batch in enumerate(islice(batches, self.num_steps)):
                self.against.read(step)
                self._load(self.against.state)
                self._draw(step)
                loss = self._step(batch)
                self.engine.wait()
                own = self.engine.training_state(self.net, self.optimizer)
                found = {
                    "loss": self._of_loss(loss, step),
                    "dropout calls": float(self.draws.others()),
                    **distances.of_step(own, self.against),
                }
                self.write("step", step + 1, found, loss=loss, own=own)
                self._draws_of_step(step, batch)

    def _draws_of_step(self, step: int, batch: Batch) -> None:
        for draw in range(self.num_draws):
            self._load_perturbed(self.against.state, step, draw)
            self._draw(step)
            with roundings.other_norms(self.engine.autocast_dtype):
                loss = self._step(batch)
            self.engine.wait()
            own = self.engine.training_state(self.net, self.optimizer)
            found = distances.of_draw(own, self.against)
            self.write("noise", step + 1, {"loss": self._of_loss(loss, step), **found})

    def _load_perturbed(self, state: TrainingState, step: int, draw: int) -> None:
        """Other draws in each pass, for the floors are two; that it can be loaded is known."""
        name = f"{self.logger.path.parent.name} {self.task.seed} {step} {draw}"
        weights = {n: state.model[n] for n in self.against.weights.parameters}
        dtype = self.engine.autocast_dtype
        weights = roundings.perturbed(weights, dtype, zlib.crc32(name.encode()))
        state = dataclasses.replace(state, model={**state.model, **weights})
        self.engine.load_training_state(self.net, self.optimizer, state)

    def evaluation(self, source: Any) -> None:
        """The first batch, scored with the weights after the last step."""
        self._load(self.against.state_after)
        unknown, off = None, 0.0
        try:
            off = distances.relative(self._score(source), self._expected_score)
        except Exception as error:  # that it cannot evaluate says nothing of its training
            unknown = f"it could not evaluate: {_in_a_line(error)}"
        self.write("evaluation", self.num_steps, {"loss": off}, note=unknown)
        for draw in range(0 if unknown else 2 * self.num_draws):
            self._load_perturbed(self.against.state_after, self.num_steps, draw)
            off = distances.relative(self._score(source), self._expected_score)
            self.write("noise of evaluation", self.num_steps, {"loss": off})

    @property
    def _expected_score(self) -> float:
        return self.against.facts.scores[self.topology.rank]

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
        return float(scores.cpu()[0].item())

    def overflow(self, source: Any) -> None:
        """A step whose float16 gradients overflow changes nothing and halves the scale."""
        before = self.against.state_after
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
        own = self.engine.training_state(self.net, self.optimizer)
        self.write("overflow", self.num_steps, distances.of_skipped_step(own, loaded))

    def free_run(self) -> None:
        """As many steps from the start, nothing loaded or read between them."""
        self._load(self.against.start_state)
        self._train_freely("free")
        for draw in range(self.num_draws):
            self._load_perturbed(self.against.start_state, self.num_steps + 1, draw)
            with roundings.other_norms(self.engine.autocast_dtype):
                self._train_freely("noise of free")

    def _train_freely(self, phase: str) -> None:
        (source,) = reference.sources(self.task, [self.topology])
        batches = self._batches(source)
        losses = []
        with closing(batches):
            for step, batch in enumerate(islice(batches, self.num_steps)):
                self._draw(step)
                losses.append(self._run_step(batch))
        self.engine.wait()
        own = self.engine.training_state(self.net, self.optimizer)
        for step, tensor in enumerate(losses):
            loss = float(tensor.cpu().item())
            self.write(phase, step + 1, {"loss": self._of_loss(loss, step)}, loss=loss)
        found = distances.of_free_run(own, self.against)
        self.write(f"{phase} end", self.num_steps, found, own=own)

    def dropout(self) -> None:
        """Whether what the engine drops by itself is dropped at random."""
        probabilities = self.against.facts.dropout_probabilities
        if not probabilities:
            return
        (source,) = reference.sources(self.task, [self.topology])
        batches = self._batches(source)
        problem, unknown = None, None
        with closing(batches):
            try:
                # A new one, for the other may remember what it was given. The mask is read from
                # a gradient, which must not be clipped.
                plain = dataclasses.replace(self.task, clip_norm=None, accumulate=1)
                problem = own_dropout(
                    engine_of(plain, self.topology), self.topology, train_step,
                    next(batches), probabilities, self.task.seed,
                )  # fmt: skip
            except Exception as error:
                # An engine may do with its own kind of model alone; the rest has been looked at.
                unknown = f"its own dropout could not be tried: {_in_a_line(error)}"
        found = {"problems": float(problem is not None)}
        self.write("own dropout", self.num_steps, found, note=problem or unknown)

    def _batches(self, source: Any) -> Generator[Batch, None, None]:
        return reference.epochs(source.train_loader(), self.engine.device_batches)

    def _draw(self, step: int) -> None:
        self.draws.begin(step, self.topology.rank, lambda t: self.engine.to_device((t,))[0])

    def _step(self, batch: Batch) -> float:
        return float(self._run_step(batch).cpu().item())

    def _run_step(self, batch: Batch) -> torch.Tensor:
        return self.engine.run_step(train_step, self.model, self.spec, self.optimizer, batch)

    def _load(self, state: TrainingState) -> None:
        """On all ranks or none, for those that could would wait for the others."""
        problem = None
        try:
            self.engine.load_training_state(self.net, self.optimizer, state)
            own = self.engine.training_state(self.net, self.optimizer)
            problem = distances.not_loaded(own, state)
        except NotLoadableError as error:
            problem = str(error)
        bad = [rank for rank, (n,) in enumerate(_gather([float(problem is not None)])) if n]
        if bad:
            raise NotLoadableError(problem or f"rank {bad[0]} did not take over its state")

    def _of_loss(self, loss: float, step: int) -> float:
        return distances.relative(loss, self.against.facts.losses[step][self.topology.rank])

    def write(
        self, phase: str, step: int, found: dict[str, float], note: str | None = None,
        loss: float | None = None, own: TrainingState | None = None,
    ) -> None:  # fmt: skip
        """Record what was found, the furthest of any rank; all ranks call this."""
        names = sorted(found)
        of_ranks = _gather([0.0, *(found[name] for name in names)])  # one value at least
        _, *furthest = [max(values, key=abs) for values in zip(*of_ranks, strict=True)]
        of_losses = [value for (value,) in _gather([0.0 if loss is None else loss])]
        mean = sum(of_losses) / len(of_losses)
        record = records.NumericsRecord(
            phase=phase,
            step=step,
            distances={n: distances.bounded(d) for n, d in zip(names, furthest, strict=True)},
            loss=None if loss is None else records.finite_or_none(mean),
            ranks_apart=0 if own is None else self._ranks_apart(own),
            note=note,
        )
        self.logger.write(record)

    def _ranks_apart(self, own: TrainingState) -> int:
        """Parameters that are not the same on all ranks, to the last bit."""
        names = sorted(dict(self.net.named_parameters()))
        sums = [float(zlib.crc32(own.model[n].contiguous().numpy().tobytes())) for n in names]
        return sum(len(set(of_ranks)) > 1 for of_ranks in zip(*_gather(sums), strict=True))


def _gather(values: list[float]) -> list[list[float]]:
    return process_group.gather_values(values)
