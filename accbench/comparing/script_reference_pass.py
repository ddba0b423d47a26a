"""The reference pass of a script: its own loop in float64. Nothing here is timed.

The script itself runs by eager DistributedDataParallel in float64, with as many workers as engines
will have. Before every step its weights and its optimizer's state are rounded to float32, so that
an engine can load exactly that state; they are stored with the gradients of the step. The twin for
tasks without a script is `reference_pass`.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accbench.comparing import shared_dropout
from accbench.comparing.reference_files import FOLDER, LOSS_SCALE
from accbench.comparing.reference_pass import DRAWS_OTHERWISE
from accbench.config import RECORDS_FILE, TaskConfig
from accbench.data import nested
from accbench.distributed import complex_numbers, process_group
from accbench.distributed.process_group import Topology
from accbench.engines import Batch, ddp
from accbench.engines.common import extra_state, tied_parameters
from accbench.engines.common.training_state import Tensors, TrainingState
from accbench.errors import RequestError
from accbench.recording import records
from accbench.recording.logger import RunLogger
from accbench.training import script
from accbench.training.accelerated_run import Run, StepListener
from accbench.training.current import Worker

# The phase of a record that says why a script's steps cannot be compared.
_NOT_COMPARABLE = "not comparable"
# Relative difference of a batch's sums in float32 and in float64.
_SAME_DATA = 1e-5


@dataclasses.dataclass(frozen=True)
class ReferenceStep:
    """One rank's record of one step of the reference."""

    loss: float
    sums: list[float]
    """Sums of the tensors in the step's batches, which tell other batches apart."""
    before: TrainingState
    gradients: Tensors
    """Averaged, and clipped if the script does so."""
    after: TrainingState
    dropout_shapes: list[list[int]]

    def write(self, folder: Path, step: int, rank: int) -> None:
        """Write the step into the reference's folder.

        Raises:
            RequestError: it cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = _path(folder, step, rank)
        try:
            torch.save(dataclasses.asdict(self), path)
        except (OSError, RuntimeError) as error:
            raise RequestError(f"cannot write {path}: {error}") from None

    @staticmethod
    def is_there(folder: Path, step: int, rank: int) -> bool:
        """Return whether the reference has this step; steps count from 0."""
        return _path(folder, step, rank).exists()

    @staticmethod
    def read(folder: Path, step: int, rank: int) -> "ReferenceStep":
        """Read a step from the reference's folder.

        Raises:
            RequestError: there is no such step.
        """
        path = _path(folder, step, rank)
        try:
            values = torch.load(path, weights_only=True)
        except (OSError, RuntimeError) as error:
            raise RequestError(f"no reference for step {step + 1} in {folder}: {error}") from None
        for name in ("before", "after"):
            values[name] = TrainingState(**values[name])
        return ReferenceStep(**values)


def tensors_folder(run_dir: Path) -> Path:
    """Return the folder of a reference's tensors."""
    return run_dir / FOLDER


def _path(folder: Path, step: int, rank: int) -> Path:
    return folder / f"step-{step:04}-rank{rank}.pt"


def sums_of(batch: Batch) -> list[float]:
    """Return the sum of each tensor in a batch, computed on the host."""
    return [float(complex_numbers.wide(tensor.cpu()).sum()) for tensor in nested.tensors_of(batch)]


def is_same_data(actual: list[float], expected: list[float]) -> bool:
    """Return whether batches are the same, by their sums."""
    return len(actual) == len(expected) and all(
        abs(a - b) <= _SAME_DATA * max(1.0, abs(b)) for a, b in zip(actual, expected, strict=True)
    )


@torch.no_grad()
def _round_state(run: Run) -> TrainingState:
    """Round all that training changes to float32, in place, and return it."""
    tensors = [*run.model.parameters(), *run.model.buffers()]
    tensors += [v for state in run.optimizer.state.values() for v in state.values()]
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            tensor.copy_(complex_numbers.singled(tensor))
    return _float32(_read_state(run))


def _read_state(run: Run) -> TrainingState:
    """Return the run's state, with the loss scale that float16 steps start from."""
    state = run.engine.training_state(run.model, run.optimizer)
    return dataclasses.replace(state, scaler={"scale": LOSS_SCALE, "growth_tracker": 0.0})


def _float32(state: TrainingState) -> TrainingState:
    def singled(tensors: Tensors) -> Tensors:
        return {name: complex_numbers.singled(tensor) for name, tensor in tensors.items()}

    optimizer_state = {name: singled(tensors) for name, tensors in state.optimizer.items()}
    extra = {k: extra_state.copy_to_host(v, wide=False) for k, v in (state.extra or {}).items()}
    return dataclasses.replace(
        state, model=singled(state.model), optimizer=optimizer_state, extra=extra
    )


def gradients(run: Run) -> Tensors:
    """Return the gradients of the last step on the host, by the parameters' names."""
    found = {
        name: parameter.grad.detach().resolve_conj()
        for name, parameter in run.model.named_parameters()
        if parameter.grad is not None
    }
    gradients: Tensors = run.to_host(found)
    return gradients


class Float64Engine(ddp.Engine):
    """Engine ddp in float64, eager and without autocast."""

    draws = False
    """Whether a forward pass drew random numbers other than dropout's."""

    def __init__(self, task: TaskConfig, topology: Topology) -> None:
        super().__init__(task, ddp.Engine.Options(channels_last=False), topology)

    def prepare(self, model: nn.Module) -> nn.Module:
        locations = tied_parameters.find_ties(model)
        model = complex_numbers.double(model)
        tied_parameters.restore_ties(locations)
        return super().prepare(model)

    def to_device(self, batch: Batch) -> Batch:
        return super().to_device(nested.mapped(batch, complex_numbers.doubled))

    def autocast(self) -> AbstractContextManager[Any]:
        return self._in_float64()

    @contextlib.contextmanager
    def _in_float64(self) -> Iterator[None]:
        """Create new tensors of a forward pass, such as masks, in float64 as well."""
        before, random = torch.get_default_dtype(), torch.get_rng_state()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
        self.draws = self.draws or not torch.equal(random, torch.get_rng_state())


def run(task: TaskConfig, topology: Topology) -> None:
    """Make the script's reference in the run's folder, and write its losses into the record.

    The record says so where the script's steps cannot be compared.
    """
    assert task.max_steps is not None
    logger = RunLogger(task.run_dir, topology.rank)
    try:
        with shared_dropout.shared_dropout():
            _run_and_store(task, topology, logger)
    except _NotComparable as reason:
        logger.write(records.NumericsRecord(_NOT_COMPARABLE, 0, {}, note=str(reason)))
    logger.write(records.EndRecord("ok", num_steps=task.max_steps))


def is_comparable(reference_dir: Path) -> bool:
    """Return whether the steps of the reference's script can be compared."""
    reference_records = records.read(reference_dir / RECORDS_FILE)
    return not any(getattr(r, "phase", None) == _NOT_COMPARABLE for r in reference_records)


def _run_and_store(task: TaskConfig, topology: Topology, logger: RunLogger) -> None:
    engine = Float64Engine(task, topology)
    # A first step records which random numbers dropout takes.
    first_step = _DropoutRecorder(shared_dropout.Draws(task.seed, []))
    with contextlib.suppress(_FirstStepDone):
        run_script(task, topology, engine, first_step.watch)
    engine = Float64Engine(task, topology)
    writers: list[_StepWriter] = []

    def watch(run: Run) -> StepListener:
        writers.append(_StepWriter(run, first_step.draws, tensors_folder(task.run_dir)))
        return writers[0]

    run_script(task, topology, engine, watch)
    for step, loss in enumerate(writers[0].losses):
        losses = [value for (value,) in process_group.all_gather_values([loss])]
        record = records.NumericsRecord(
            "reference", step + 1, {}, records.finite_or_none(sum(losses) / len(losses)),
            note=DRAWS_OTHERWISE if engine.draws else None,
        )  # fmt: skip
        logger.write(record)


class _HeaderLogger(RunLogger):
    """A logger that writes the run's header alone, for the runs of the script within a pass."""

    def write(self, record: records.Record) -> None:
        if isinstance(record, records.RunRecord):
            super().write(record)


def run_script(
    task: TaskConfig, topology: Topology, engine: Any, watch: Callable[[Run], StepListener]
) -> None:
    """Run the script once; its run writes its header, and no windows.

    Args:
        task: the task, with the script.
        topology: this worker's rank.
        engine: what `accbench.accelerate` uses in the script.
        watch: called with the script's run; what it returns sees every step.
    """

    def begin(run: Run) -> StepListener:
        if not run.loaders:
            run.let_go()
            raise _NotComparable(
                "the script gives accelerate no loader, whose batches the reference has in float64"
            )
        run.logger = run.timer.listener.logger = _HeaderLogger(task.run_dir, topology.rank)  # type: ignore[attr-defined]
        return watch(run)

    engine.close = lambda: None  # the caller uses it again
    script.run_in(Worker(task, topology, 0.0, None, engine, begin))


class _NotComparable(BaseException):  # noqa: N818  # which no script catches
    """Ends a script whose steps cannot be compared; the message says why, without a full stop."""


class _FirstStepDone(BaseException):
    """Ends the script after its first step."""


class _DropoutRecorder(StepListener):
    """Records the shapes of the random numbers that dropout takes in the first step."""

    def __init__(self, draws: shared_dropout.Draws) -> None:
        self.draws = draws

    def watch(self, run: Run) -> StepListener:
        self.run = run
        return self

    def before_step(self) -> None:
        self.draws.begin(0, 0, lambda tensor: tensor)

    def after_step(self, loss: torch.Tensor, is_own: bool) -> None:
        self.draws.shapes = shared_dropout.unexpected_shapes()
        raise _FirstStepDone


class _StepWriter(StepListener):
    """Writes every step of the reference to the disk."""

    def __init__(self, run: Run, draws: shared_dropout.Draws, folder: Path) -> None:
        self.run, self.draws, self.folder = run, draws, folder
        self.losses: list[float] = []
        self.sums: list[float] = []
        self.before: TrainingState | None = None
        self.shapes = draws.shapes

    def before_step(self) -> None:
        self.sums = []
        self.before = _round_state(self.run)
        self.draws.begin(len(self.losses), self.run.rank, lambda t: self.run.engine.to_device(t))

    def got(self, batch: Batch) -> None:
        self.sums += sums_of(batch)

    def after_step(self, loss: torch.Tensor, is_own: bool) -> None:
        before, self.before = self.before, None
        if not is_own:
            raise _NotComparable(
                "the script steps another optimizer than accelerate was given, or that one first; "
                "steps are compared by the formula of the one that was given"
            )
        if before is None:
            raise _NotComparable(
                "the script takes a step for which it asked no loader for a batch, as a second one "
                "by the same batch; steps are compared from batch to batch"
            )
        step = len(self.losses)
        self.losses.append(float(loss))
        reference_step = ReferenceStep(
            self.losses[-1], self.sums, before, gradients(self.run), _read_state(self.run),
            [list(shape) for shape in self.shapes or ()],
        )  # fmt: skip
        reference_step.write(self.folder, step, self.run.rank)
