"""What a script's float64 reference leaves of a step, and how far an engine's step is from it."""

import dataclasses
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accbench.comparing import distances
from accbench.comparing.reference import FOLDER, LOSS_SCALE
from accbench.data import nested
from accbench.distributed import process_group
from accbench.engines import Batch
from accbench.engines.common import complex_numbers, extra_state
from accbench.engines.common.training_state import (
    NotLoadableError,
    Tensors,
    TrainingState,
)
from accbench.errors import RequestError
from accbench.recording import records
from accbench.recording.logger import RunLogger
from accbench.training.accelerated_run import Run

# Relative: the sum of a batch in float32 and in float64.
_SAME_DATA = 1e-5


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of the reference, as one rank has it."""

    loss: float
    sums: list[float]
    """Of the tensors of its batches, by which other batches are known."""
    before: TrainingState
    gradients: Tensors
    """Averaged, and clipped if the script does so."""
    after: TrainingState
    dropout_shapes: list[list[int]]

    def write(self, folder: Path, step: int, rank: int) -> None:
        """Raises RequestError where the disk does not take it."""
        folder.mkdir(parents=True, exist_ok=True)
        path = _path(folder, step, rank)
        try:
            torch.save(dataclasses.asdict(self), path)
        except (OSError, RuntimeError) as error:
            raise RequestError(f"cannot write {path}: {error}") from None

    @staticmethod
    def is_there(folder: Path, step: int, rank: int) -> bool:
        """Whether the reference had that many steps, which count from 0."""
        return _path(folder, step, rank).exists()

    @staticmethod
    def read(folder: Path, step: int, rank: int) -> "Step":
        """Raises RequestError where there is none."""
        path = _path(folder, step, rank)
        try:
            values = torch.load(path, weights_only=True)
        except (OSError, RuntimeError) as error:
            raise RequestError(f"no reference for step {step + 1} in {folder}: {error}") from None
        for name in ("before", "after"):
            values[name] = TrainingState(**values[name])
        return Step(**values)


def folder(run_dir: Path) -> Path:
    """Where a reference's tensors lie."""
    return run_dir / FOLDER


def _path(folder: Path, step: int, rank: int) -> Path:
    return folder / f"step-{step:04}-rank{rank}.pt"


def sums_of(batch: Batch) -> list[float]:
    """Of each tensor, on the host."""
    return [float(complex_numbers.wide(tensor.cpu()).sum()) for tensor in nested.tensors_of(batch)]


def same_data(own: list[float], expected: list[float]) -> bool:
    """Whether batches are the same, by their sums."""
    return len(own) == len(expected) and all(
        abs(a - b) <= _SAME_DATA * max(1.0, abs(b)) for a, b in zip(own, expected, strict=True)
    )


@torch.no_grad()
def rounded(run: Run) -> TrainingState:
    """Round all that training changes to float32, in place, and read it."""
    tensors = [*run.model.parameters(), *run.model.buffers()]
    tensors += [v for state in run.optimizer.state.values() for v in state.values()]
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            tensor.copy_(complex_numbers.singled(tensor))
    return _float32(state_of(run))


def state_of(run: Run) -> TrainingState:
    """The state, with the loss scale that float16 steps start from."""
    found = run.engine.training_state(run.model, run.optimizer)
    return dataclasses.replace(found, scaler={"scale": LOSS_SCALE, "growth_tracker": 0.0})


def _float32(state: TrainingState) -> TrainingState:
    def of(tensors: Tensors) -> Tensors:
        return {name: complex_numbers.singled(tensor) for name, tensor in tensors.items()}

    of_parameters = {name: of(tensors) for name, tensors in state.optimizer.items()}
    extra = {k: extra_state.copy_to_host(v, wide=False) for k, v in (state.extra or {}).items()}
    return dataclasses.replace(state, model=of(state.model), optimizer=of_parameters, extra=extra)


def gradients(run: Run) -> Tensors:
    """Of the step that was taken last, by the parameter's name, on the host."""
    return {
        name: parameter.grad.detach().resolve_conj().to("cpu", copy=True)
        for name, parameter in run.model.named_parameters()
        if parameter.grad is not None
    }


def of_step(run: Run, own: TrainingState, expected: Step) -> dict[str, float]:
    """Of one step from the reference's state, in the words of `distances.of_step`."""
    of_own = {n: complex_numbers.doubled(gradient) for n, gradient in gradients(run).items()}
    buffers = {
        name: tensor
        for name, tensor in expected.after.model.items()
        if name not in dict(run.model.named_parameters())
    }
    return {
        **distances.of_gradients(of_own, expected.gradients),
        **_of_updates(run, own, expected.before, of_own),
        **distances.of_buffers(own.model, expected.before.model, buffers),
        **distances.of_extra(own.extra, expected.before.extra, expected.after.extra),
        **_of_counts(own, expected.after),
    }


def _of_updates(
    run: Run, own: TrainingState, before: TrainingState, gradients: Tensors
) -> dict[str, float]:
    """From where the script's own optimizer puts the parameters in float64, by these gradients."""
    found = {}
    after = _stepped(run, before, gradients)
    for name, parameter in run.model.named_parameters():
        if name not in after.model:  # not the optimizer's
            moved = distances.of_update(own.model[name], before.model[name], before.model[name])
            found[f"{distances.UPDATE} of {name}"] = moved
            continue
        found[f"{distances.UPDATE} of {name}"] = distances.of_update(
            own.model[name], before.model[name], after.model[name]
        )
        kept = [
            distances.of_update(
                own.optimizer.get(name, {}).get(key),
                before.optimizer.get(name, {}).get(key, torch.zeros_like(tensor)),
                tensor,
            )
            for key, tensor in after.optimizer[name].items()
            if tensor.shape == parameter.shape and parameter.dim()
        ]
        if kept:
            found[f"{distances.SECOND_MOMENT} of {name}"] = max(kept)
    return found


def _stepped(run: Run, before: TrainingState, gradients: Tensors) -> TrainingState:
    """One step of the optimizer as the script built it, on the host in float64.

    Raises:
        NotLoadableError: a class of its own that cannot be rebuilt.
    """
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    copies: dict[str, nn.Parameter] = {}
    state: Any = defaultdict(dict)
    groups = []
    settings = {"foreach": False, "fused": False, "capturable": False}
    for group in run.optimizer.param_groups:
        own = [names[id(parameter)] for parameter in group["params"]]
        for name in own:
            copies[name] = copy = nn.Parameter(complex_numbers.doubled(before.model[name]))
            copy.grad = gradients.get(name)
            kept = before.optimizer.get(name, {})
            state[copy] = {
                k: complex_numbers.doubled(t) if t.shape == copy.shape else t
                for k, t in kept.items()
            }
        given = {name: value for name, value in settings.items() if name in group}
        groups.append({**group, **given, "params": [copies[name] for name in own]})
    try:
        optimizer: Any = run.optimizer_class.__new__(run.optimizer_class)
        optimizer.__setstate__(
            {"defaults": dict(run.optimizer.defaults), "state": state, "param_groups": groups}
        )
        optimizer.step()
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise NotLoadableError(f"its optimizer does not step in float64: {why}") from error
    of_parameters = {
        name: {k: v for k, v in optimizer.state[p].items() if isinstance(v, torch.Tensor)}
        for name, p in copies.items()
    }
    return TrainingState({name: p.detach() for name, p in copies.items()}, of_parameters)


def _of_counts(own: TrainingState, expected: TrainingState) -> dict[str, float]:
    wrong = [
        abs(float(own.optimizer.get(name, {}).get("step", -1.0)) - float(kept["step"]))
        for name, kept in expected.optimizer.items()
        if "step" in kept
    ]
    counts = {"applied steps": max(wrong, default=0.0)}
    if own.scaler:
        counts["loss scale"] = abs(own.scaler["scale"] / LOSS_SCALE - 1)
        counts["growth tracker"] = abs(own.scaler["growth_tracker"] - 1)
    return counts


def write(
    logger: RunLogger, phase: str, step: int, found: dict[str, float], loss: float | None,
    own: TrainingState | None, model: nn.Module,
) -> None:  # fmt: skip
    """Record what was found, the furthest of any rank; all ranks call this."""
    names = sorted(found)
    of_ranks = process_group.gather_values([0.0, *(found[name] for name in names)])
    _, *furthest = [max(values, key=abs) for values in zip(*of_ranks, strict=True)]
    losses = [value for (value,) in process_group.gather_values([0.0 if loss is None else loss])]
    record = records.NumericsRecord(
        phase,
        step,
        {n: distances.bounded(d) for n, d in zip(names, furthest, strict=True)},
        None if loss is None else records.finite_or_none(sum(losses) / len(losses)),
        0 if own is None else _ranks_apart(own, model),
    )
    logger.write(record)


def _ranks_apart(own: TrainingState, model: nn.Module) -> int:
    names = sorted(dict(model.named_parameters()))
    sums = [float(zlib.crc32(own.model[n].contiguous().numpy().tobytes())) for n in names]
    of_ranks = zip(*process_group.gather_values(sums), strict=True)
    return sum(len(set(values)) > 1 for values in of_ranks)
