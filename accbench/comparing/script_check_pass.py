"""The check pass of a script: hold an engine against the script's reference. Nothing here is timed.

It runs the script twice: once with every step from the reference's state, and once freely. The
twin for tasks without a script is `check_pass`.
"""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accbench.comparing import distances, rank_results, script_reference_pass, shared_dropout
from accbench.comparing.script_reference_pass import ReferenceStep
from accbench.config import TaskConfig
from accbench.distributed import complex_numbers
from accbench.distributed.process_group import Topology
from accbench.engines import Batch
from accbench.engines.common.training_state import NotLoadableError, Tensors, TrainingState
from accbench.errors import RequestError
from accbench.recording import records
from accbench.recording.logger import RunLogger
from accbench.training.accelerated_run import Run, StepListener
from accbench.training.opening import open_first_engine


def run(task: TaskConfig, topology: Topology, reference_dir: Path) -> None:
    """Hold the task's engine against the script's reference and record the distances.

    Args:
        task: the engine's task, with the script.
        topology: this worker's rank.
        reference_dir: the run folder of the reference.

    Raises:
        RequestError: there is no reference, or the script takes other steps than it.
    """
    assert task.max_steps is not None
    logger = RunLogger(task.run_dir, topology.rank)
    if script_reference_pass.is_comparable(reference_dir):
        with shared_dropout.shared_dropout():
            _check(task, topology, reference_dir, logger)
    else:
        logger.write(records.NumericsRecord("script", 0, {}))
    logger.write(records.EndRecord("ok", num_steps=task.max_steps))


def _check(task: TaskConfig, topology: Topology, reference_dir: Path, logger: RunLogger) -> None:
    folder = script_reference_pass.tensors_folder(reference_dir)
    engine = open_first_engine(task, topology)
    first = ReferenceStep.read(folder, 0, topology.rank)
    shapes = [tuple(shape) for shape in first.dropout_shapes]
    for free in (False, True):
        draws = shared_dropout.Draws(task.seed, shapes)
        checks: list[_StepCheck] = []
        check_class = _FreeRunCheck if free else _StepCheck
        watch = _watch_with(checks, check_class, draws, folder, logger)

        try:
            script_reference_pass.run_script(task, topology, engine, watch)
        except NotLoadableError as error:
            logger.write(records.NumericsRecord("not loadable", 0, {}, note=str(error)))
            return
        checks[0].finish()
    # Tells the report that a script has no evaluation pass and the like.
    logger.write(records.NumericsRecord("script", task.max_steps or 0, {}))


def _watch_with(
    checks: "list[_StepCheck]", check_class: "type[_StepCheck]", draws: shared_dropout.Draws,
    folder: Path, logger: RunLogger,
) -> Callable[[Run], StepListener]:  # fmt: skip
    """Return a function that builds a run's check and appends it to `checks`."""

    def watch(run: Run) -> StepListener:
        checks.append(check_class(run, draws, folder, logger))
        return checks[-1]

    return watch


class _StepCheck(StepListener):
    """Checks every step of an engine, each from the reference's state."""

    def __init__(
        self, run: Run, draws: shared_dropout.Draws, folder: Path, logger: RunLogger
    ) -> None:
        self.run, self.draws, self.folder, self.logger = run, draws, folder, logger
        self.step = 0
        self.start = first = ReferenceStep.read(folder, 0, run.rank)
        state = run.engine.training_state(run.model, run.optimizer)
        self.write("start", 0, distances.of_start(state, first.before))

    def before_step(self) -> None:
        self.sums: list[float] = []
        if not ReferenceStep.is_there(self.folder, self.step, self.run.rank):
            return  # the script also asks for a batch after its last; `got` raises the error
        self.expected = ReferenceStep.read(self.folder, self.step, self.run.rank)
        self.load()
        self.draws.begin(self.step, self.run.rank, lambda t: self.run.engine.to_device(t))

    def load(self) -> None:
        """Load the state that the reference's step began in into the engine."""
        engine, state = self.run.engine, self.expected.before
        problem = None
        try:
            engine.load_training_state(self.run.model, self.run.optimizer, state)
            loaded = engine.training_state(self.run.model, self.run.optimizer)
            problem = distances.not_loaded(loaded, state)
        except NotLoadableError as error:
            problem = str(error)
        rank_results.raise_together(problem, "did not take over its state")

    def got(self, batch: Batch) -> None:
        self.sums += script_reference_pass.sums_of(batch)
        if not ReferenceStep.is_there(self.folder, self.step, self.run.rank):
            raise RequestError(
                f"the script took {self.step} steps for the reference, and goes on for this engine"
            )

    def after_step(self, loss: torch.Tensor, is_own: bool) -> None:
        self.run.engine.wait()
        is_same = script_reference_pass.is_same_data(self.sums, self.expected.sums)
        rank_results.raise_together(
            None if is_same else "the script gives other batches than to the reference",
            "is given other batches by the script than the reference was",
        )
        state = self.run.engine.training_state(self.run.model, self.run.optimizer)
        value = float(loss.cpu())
        measured = {
            "loss": distances.relative(value, self.expected.loss),
            "dropout calls": float(self.draws.num_others()),
            **_of_step(self.run, state, self.expected),
        }
        self.step += 1
        self.write("step", self.step, measured, value, state)

    def finish(self) -> None:
        """Record what is known only after the last step."""

    def write(
        self, phase: str, step: int, measured: dict[str, float], loss: float | None = None,
        state: TrainingState | None = None,
    ) -> None:  # fmt: skip
        names = dict(self.run.model.named_parameters())
        num_apart = 0 if state is None else rank_results.count_apart(state.model, names)
        rank_results.write(self.logger, phase, step, measured, loss=loss, num_apart=num_apart)


class _FreeRunCheck(_StepCheck):
    """Checks a whole run, with nothing loaded or read between its steps."""

    def __init__(
        self, run: Run, draws: shared_dropout.Draws, folder: Path, logger: RunLogger
    ) -> None:
        super().__init__(run, draws, folder, logger)
        self.losses: list[torch.Tensor] = []

    def load(self) -> None:
        return

    def after_step(self, loss: torch.Tensor, is_own: bool) -> None:
        self.losses.append(loss)
        self.step += 1

    def finish(self) -> None:
        run = self.run
        for step, loss in enumerate(self.losses):
            value = float(loss.cpu())
            expected = ReferenceStep.read(self.folder, step, run.rank)
            self.write("free", step + 1, {"loss": distances.relative(value, expected.loss)}, value)
        state = run.engine.training_state(run.model, run.optimizer)
        names = dict(run.model.named_parameters())
        start = {name: self.start.before.model[name] for name in names}
        after = {name: expected.after.model[name] for name in names}
        end = distances.of_weights(state.model, start, after)
        self.write("free end", self.step, end, state=state)


def _of_step(run: Run, actual: TrainingState, expected: ReferenceStep) -> dict[str, float]:
    """Compare one step from the reference's state; the keys are those of `distances.of_step`."""
    gradients = {
        name: complex_numbers.doubled(gradient)
        for name, gradient in script_reference_pass.gradients(run).items()
    }
    buffers = {
        name: tensor
        for name, tensor in expected.after.model.items()
        if name not in dict(run.model.named_parameters())
    }
    return {
        **distances.of_gradients(gradients, expected.gradients),
        **_of_updates(run, actual, expected.before, gradients),
        **distances.of_buffers(actual.model, expected.before.model, buffers),
        **distances.of_extra(actual.extra, expected.before.extra, expected.after.extra),
        **_of_counts(actual, expected.after),
    }


def _of_updates(
    run: Run, actual: TrainingState, before: TrainingState, gradients: Tensors
) -> dict[str, float]:
    """Compare parameters with what the script's own optimizer makes of `gradients` in float64."""
    measured = {}
    after = _step_in_float64(run, before, gradients)
    for name, parameter in run.model.named_parameters():
        if name not in after.model:  # not the optimizer's
            moved = distances.of_update(actual.model[name], before.model[name], before.model[name])
            measured[f"{distances.UPDATE} of {name}"] = moved
            continue
        measured[f"{distances.UPDATE} of {name}"] = distances.of_update(
            actual.model[name], before.model[name], after.model[name]
        )
        state_distances = [
            distances.of_update(
                actual.optimizer.get(name, {}).get(key),
                before.optimizer.get(name, {}).get(key, torch.zeros_like(tensor)),
                tensor,
            )
            for key, tensor in after.optimizer[name].items()
            if tensor.shape == parameter.shape and parameter.dim()
        ]
        if state_distances:
            measured[f"{distances.SECOND_MOMENT} of {name}"] = max(state_distances)
    return measured


def _step_in_float64(run: Run, before: TrainingState, gradients: Tensors) -> TrainingState:
    """Compute one step of the script's optimizer, on the host in float64.

    Raises:
        NotLoadableError: the script's optimizer class cannot be rebuilt.
    """
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    copies: dict[str, nn.Parameter] = {}
    state: Any = defaultdict(dict)
    groups = []
    settings = {"foreach": False, "fused": False, "capturable": False}
    for group in run.optimizer.param_groups:
        group_names = [names[id(parameter)] for parameter in group["params"]]
        for name in group_names:
            copies[name] = copy = nn.Parameter(complex_numbers.doubled(before.model[name]))
            copy.grad = gradients.get(name)
            tensors = before.optimizer.get(name, {})
            state[copy] = {
                k: complex_numbers.doubled(t) if t.shape == copy.shape else t
                for k, t in tensors.items()
            }
        plain = {name: value for name, value in settings.items() if name in group}
        groups.append({**group, **plain, "params": [copies[name] for name in group_names]})
    try:
        optimizer: Any = run.optimizer_class.__new__(run.optimizer_class)
        optimizer.__setstate__(
            {"defaults": dict(run.optimizer.defaults), "state": state, "param_groups": groups}
        )
        optimizer.step()
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise NotLoadableError(f"its optimizer does not step in float64: {why}") from error
    optimizer_state = {
        name: {k: v for k, v in optimizer.state[p].items() if isinstance(v, torch.Tensor)}
        for name, p in copies.items()
    }
    return TrainingState({name: p.detach() for name, p in copies.items()}, optimizer_state)


def _of_counts(actual: TrainingState, expected: TrainingState) -> dict[str, float]:
    wrong = [
        abs(float(actual.optimizer.get(name, {}).get("step", -1.0)) - float(tensors["step"]))
        for name, tensors in expected.optimizer.items()
        if "step" in tensors
    ]
    return {"applied steps": max(wrong, default=0.0), **distances.of_scaler(actual)}
