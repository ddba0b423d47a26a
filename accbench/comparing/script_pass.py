"""The numerics pass of a script: its loop, step by step beside float64. Nothing here is timed.

The reference is the script itself by eager DistributedDataParallel in float64, with as many
workers. Before every step its weights and its optimizer's state are rounded to float32, so that
an engine can be put into exactly that state; it leaves them on disk with the gradients of the
step. An engine's pass runs the script twice: once with every step from the reference's state,
and once freely.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accbench.comparing import distances, dropout, script_reference
from accbench.comparing.script_reference import Step
from accbench.config import TaskConfig
from accbench.data import nested
from accbench.distributed import process_group
from accbench.distributed.process_group import Topology
from accbench.engines import Batch, ddp
from accbench.engines.common import complex_numbers, tied_parameters
from accbench.engines.common.training_state import NotLoadableError, TrainingState
from accbench.errors import RequestError
from accbench.recording import records
from accbench.recording.logger import RunLogger
from accbench.training import script
from accbench.training.accelerated_run import Run, Watch
from accbench.training.current import Worker
from accbench.training.opening import first_engine_of


class Float64(ddp.Engine):
    """Eager, plain, in float64."""

    draws = False
    """Whether a forward pass took random numbers, beside dropout's."""

    def __init__(self, task: TaskConfig, topology: Topology) -> None:
        super().__init__(task, ddp.Engine.Options(channels_last=False), topology)

    def prepare(self, model: nn.Module) -> nn.Module:
        places = tied_parameters.find_ties(model)
        model = complex_numbers.double(model)
        tied_parameters.restore_ties(places)
        return super().prepare(model)

    def to_device(self, batch: Batch) -> Batch:
        return super().to_device(nested.mapped(batch, complex_numbers.doubled))

    def autocast(self) -> AbstractContextManager[Any]:
        return self._in_float64()

    @contextlib.contextmanager
    def _in_float64(self) -> Iterator[None]:
        """What a forward pass makes anew, a mask for one, is float64 as well."""
        before, random = torch.get_default_dtype(), torch.get_rng_state()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
        self.draws = self.draws or not torch.equal(random, torch.get_rng_state())


def run(task: TaskConfig, topology: Topology, reference_dir: Path | None) -> None:
    """Make a reference in the run's folder, or hold the task's engine against one."""
    assert task.max_steps is not None
    logger = RunLogger(task.run_dir, topology.rank)
    with dropout.given():
        if reference_dir is None:
            _make(task, topology, logger)
        else:
            _check(task, topology, reference_dir, logger)
    logger.write(records.EndRecord("ok", num_steps=task.max_steps))


class _Silent(RunLogger):
    """For the runs within a pass, which are not what the record is of."""

    def write(self, record: records.Record) -> None:
        if isinstance(record, records.RunRecord):
            super().write(record)


def _run_script(
    task: TaskConfig, topology: Topology, engine: Any, watch: Callable[[Run], Watch]
) -> None:
    """Run the script once; its run writes its header, and nothing of windows."""
    task_of_pass = task

    def begin(run: Run) -> Watch:
        run.logger = run.timer.listener.logger = _Silent(task.run_dir, topology.rank)  # type: ignore[attr-defined]
        return watch(run)

    engine.close = lambda: None  # it is used again
    script.run_in(Worker(task_of_pass, topology, 0.0, None, engine, begin))


def _make(task: TaskConfig, topology: Topology, logger: RunLogger) -> None:
    assert task.max_steps is not None
    engine = Float64(task, topology)
    draws = dropout.Draws(task.seed, [])
    # A first step tells which random numbers dropout takes.
    once = _Once(draws)
    with contextlib.suppress(_Enough):
        _run_script(task, topology, engine, once.watch)
    engine = Float64(task, topology)
    of_run: list[_Teacher] = []

    def watch(run: Run) -> Watch:
        of_run.append(_Teacher(run, once.draws, script_reference.folder(task.run_dir)))
        return of_run[0]

    _run_script(task, topology, engine, watch)
    note = "the model draws random numbers that cannot be given to all engines"
    for step, loss in enumerate(of_run[0].losses):
        own = process_group.gather_values([loss])
        record = records.NumericsRecord(
            "reference", step + 1, {}, records.finite_or_none(sum(v for (v,) in own) / len(own)),
            note=note if engine.draws else None,
        )  # fmt: skip
        logger.write(record)


class _Enough(BaseException):
    """A first step was seen."""


class _Once(Watch):
    """Learns what dropout takes in a step."""

    def __init__(self, draws: dropout.Draws) -> None:
        self.draws = draws

    def watch(self, run: Run) -> Watch:
        self.run = run
        return self

    def before_step(self) -> None:
        self.draws.begin(0, 0, lambda tensor: tensor)

    def after_step(self, loss: torch.Tensor) -> None:
        self.draws.shapes = dropout.taken()
        raise _Enough


class _Teacher(Watch):
    """Leaves every step of the reference on disk."""

    def __init__(self, run: Run, draws: dropout.Draws, folder: Path) -> None:
        self.run, self.draws, self.folder = run, draws, folder
        self.losses: list[float] = []
        self.sums: list[float] = []
        self.shapes = draws.shapes

    def before_step(self) -> None:
        self.sums = []
        self.before = script_reference.rounded(self.run)
        self.draws.begin(len(self.losses), self.run.rank, lambda t: self.run.engine.to_device(t))

    def got(self, batch: Batch) -> None:
        self.sums += script_reference.sums_of(batch)

    def after_step(self, loss: torch.Tensor) -> None:
        step = len(self.losses)
        self.losses.append(float(loss))
        found = Step(
            self.losses[-1], self.sums, self.before, script_reference.gradients(self.run),
            script_reference.state_of(self.run), [list(shape) for shape in self.shapes or ()],
        )  # fmt: skip
        found.write(self.folder, step, self.run.rank)


def _check(task: TaskConfig, topology: Topology, reference_dir: Path, logger: RunLogger) -> None:
    folder = script_reference.folder(reference_dir)
    engine = first_engine_of(task, topology)
    first = Step.read(folder, 0, topology.rank)
    shapes = [tuple(shape) for shape in first.dropout_shapes]
    pupil: Callable[[Run], Watch]
    for free in (False, True):
        draws = dropout.Draws(task.seed, shapes)
        pupils: list[_Pupil] = []

        def pupil(run: Run, free: bool = free, draws: Any = draws, made: Any = pupils) -> Watch:
            made.append((_Free if free else _Pupil)(run, draws, folder, logger))
            return made[0]

        try:
            _run_script(task, topology, engine, pupil)
        except NotLoadableError as error:
            logger.write(records.NumericsRecord("not loadable", 0, {}, note=str(error)))
            return
        pupils[0].finish()
    # So that the report says what there is no pass for.
    logger.write(records.NumericsRecord("script", task.max_steps or 0, {}))


class _Pupil(Watch):
    """Holds every step of an engine against the reference's, from the reference's state."""

    def __init__(self, run: Run, draws: dropout.Draws, folder: Path, logger: RunLogger) -> None:
        self.run, self.draws, self.folder, self.logger = run, draws, folder, logger
        self.step = 0
        self.start = first = Step.read(folder, 0, run.rank)
        own = run.engine.training_state(run.model, run.optimizer)
        self.write("start", 0, distances.of_start(own, first.before))

    def before_step(self) -> None:
        self.sums: list[float] = []
        if not Step.is_there(self.folder, self.step, self.run.rank):
            return  # the script asks for a batch after its last, too; `got` has more to say
        self.expected = Step.read(self.folder, self.step, self.run.rank)
        self.load()
        self.draws.begin(self.step, self.run.rank, lambda t: self.run.engine.to_device(t))

    def load(self) -> None:
        """Put the engine into the state that the reference's step began in."""
        engine, state = self.run.engine, self.expected.before
        problem = None
        try:
            engine.load_training_state(self.run.model, self.run.optimizer, state)
            own = engine.training_state(self.run.model, self.run.optimizer)
            problem = distances.not_loaded(own, state)
        except NotLoadableError as error:
            problem = str(error)
        self.agree(problem)

    def agree(self, problem: str | None) -> None:
        """Raise on all ranks what any has met."""
        bad = process_group.gather_values([float(problem is not None)])
        if any(n for (n,) in bad):
            raise NotLoadableError(problem or "another rank could not load its state")

    def got(self, batch: Batch) -> None:
        self.sums += script_reference.sums_of(batch)
        if not Step.is_there(self.folder, self.step, self.run.rank):
            raise RequestError(
                f"the script took {self.step} steps for the reference, and goes on for this engine"
            )

    def after_step(self, loss: torch.Tensor) -> None:
        self.run.engine.wait()
        others = not script_reference.same_data(self.sums, self.expected.sums)
        self.agree("the script gives other batches than to the reference" if others else None)
        own = self.run.engine.training_state(self.run.model, self.run.optimizer)
        value = float(loss.cpu())
        found = {
            "loss": distances.relative(value, self.expected.loss),
            "dropout calls": float(self.draws.others()),
            **script_reference.of_step(self.run, own, self.expected),
        }
        self.step += 1
        self.write("step", self.step, found, value, own)

    def finish(self) -> None:
        """After the last step."""

    def write(
        self, phase: str, step: int, found: dict[str, float], loss: float | None = None,
        own: TrainingState | None = None,
    ) -> None:  # fmt: skip
        script_reference.write(self.logger, phase, step, found, loss, own, self.run.model)


class _Free(_Pupil):
    """Nothing is loaded or read between steps."""

    def __init__(self, run: Run, draws: dropout.Draws, folder: Path, logger: RunLogger) -> None:
        super().__init__(run, draws, folder, logger)
        self.losses: list[torch.Tensor] = []

    def load(self) -> None:
        return

    def after_step(self, loss: torch.Tensor) -> None:
        self.losses.append(loss)
        self.step += 1

    def finish(self) -> None:
        run = self.run
        for step, loss in enumerate(self.losses):
            value = float(loss.cpu())
            expected = Step.read(self.folder, step, run.rank)
            self.write("free", step + 1, {"loss": distances.relative(value, expected.loss)}, value)
        own = run.engine.training_state(run.model, run.optimizer)
        names = dict(run.model.named_parameters())
        start = {name: self.start.before.model[name] for name in names}
        after = {name: expected.after.model[name] for name in names}
        self.write("free end", self.step, distances.of_weights(own.model, start, after), own=own)
