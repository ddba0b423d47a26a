"""A reference on disk: what the reference pass stores, and what a rank reads of it, step by step.

It stores the weights at the start, and of each step the gradients and the buffers after it. The
weights between steps follow from these, to the bit.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from accbench.comparing.update_rules import Rule, Weights
from accbench.distributed import complex_numbers
from accbench.engines.common import extra_state
from accbench.engines.common.training_state import Tensors, TrainingState
from accbench.errors import RequestError

FOLDER = "reference"
_FACTS, _START = "facts.json", "start.safetensors"
_PARAMETER, _GRADIENT, _BUFFER, _EXTRA = "parameter/", "gradient/", "buffer/", "extra/"
# The loss scale that float16 steps start from: nothing overflows, and little underflows.
LOSS_SCALE = 1024.0


@dataclasses.dataclass(frozen=True)
class ReferenceFacts:
    """Holds what a reference stores besides its tensors."""

    losses: list[list[float]]
    """Step -> rank -> the loss of its shard."""
    scores: list[float]
    """Rank -> the summed loss of its first batch, evaluated after the last step."""
    dropout_shapes: list[list[int]]
    """Shape of the random numbers that each dropout call of a forward pass takes."""
    dropout_probabilities: list[float]
    """The distinct probabilities of the model's dropout layers."""
    draws_otherwise: bool
    """True where the model draws random numbers that engines cannot share."""
    batch_size: int = 0
    workers_per_batch: int = 1
    """Workers that share a batch; if several, nothing is dropped, as their masks are other ones."""
    is_undropped: bool = False
    """True for a worker of several devices, whose dropout takes no masks and so drops nothing."""
    cache_key: str | None = None
    """Name of the entry that keeps it for later comparisons, see `reference_cache`."""

    @property
    def drops(self) -> bool:
        """Return whether dropout drops."""
        return self.workers_per_batch == 1 and not self.is_undropped


@dataclasses.dataclass(frozen=True)
class RankState:
    """Holds what a rank has besides the parameters that all ranks share."""

    buffers: Tensors
    extra: dict[str, Any]
    """Module -> its extra state."""


def _step_file(step: int) -> str:
    return f"step-{step:04}.safetensors"


def save_start(folder: Path, parameters: Tensors, ranks: Sequence[RankState]) -> None:
    """Store the parameters at the start, and what each rank has besides.

    Raises:
        RequestError: the file cannot be written.
    """
    _save(folder / _START, {_PARAMETER + name: p for name, p in parameters.items()}, ranks)


def save_step(folder: Path, step: int, gradients: Tensors, ranks: Sequence[RankState]) -> None:
    """Store the averaged gradients of a step, from 0, and what each rank has besides after it.

    Raises:
        RequestError: the file cannot be written.
    """
    averaged = {_GRADIENT + name: gradient for name, gradient in gradients.items()}
    _save(folder / _step_file(step), averaged, ranks)


def _save(path: Path, shared: Tensors, ranks: Sequence[RankState]) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in shared.items()}
    metadata: dict[str, str] = {}
    for rank, state in enumerate(ranks):
        tensors |= {f"{_BUFFER}{rank}/{name}": tensor for name, tensor in state.buffers.items()}
        extra: list[torch.Tensor] = []
        packed = {key: extra_state.pack(v, extra) for key, v in state.extra.items()}
        metadata[str(rank)] = json.dumps(packed)
        tensors |= {f"{_EXTRA}{rank}/{number}": tensor for number, tensor in enumerate(extra)}
    try:
        save_file(complex_numbers.as_real(tensors), path, metadata)
    except (OSError, SafetensorError) as error:
        raise RequestError(f"cannot write {path}: {error}") from None


def _load(path: Path, rank: int) -> tuple[Tensors, dict[str, Any]]:
    """Read the tensors of a file, and a rank's extra state."""
    tensors = complex_numbers.as_complex(load_file(path))
    with safe_open(path, "pt") as file:
        packed = json.loads(file.metadata()[str(rank)])
    extra = _with_prefix(tensors, f"{_EXTRA}{rank}/")
    in_order = [extra[str(number)] for number in range(len(extra))]
    return tensors, {key: extra_state.unpack(value, in_order) for key, value in packed.items()}


def _with_prefix(tensors: Tensors, prefix: str) -> Tensors:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def write_facts(folder: Path, facts: ReferenceFacts) -> None:
    """Store a reference's facts, which end it."""
    text = json.dumps(dataclasses.asdict(facts)) + "\n"
    (folder / _FACTS).write_text(text, encoding="utf-8")


def read_facts(folder: Path) -> ReferenceFacts:
    """Read the facts of a reference from the folder of its tensors.

    Raises:
        RequestError: there is no reference.
    """
    try:
        return ReferenceFacts(**json.loads((folder / _FACTS).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise RequestError(f"no reference in {folder}: {error}") from None


class Reference:
    """A stored reference that one rank reads, step by step."""

    def __init__(self, run_dir: Path, rule: Rule, rank: int) -> None:
        self.folder, self.rule, self.rank = run_dir / FOLDER, rule, rank
        self.facts = read_facts(self.folder)
        start, extra = _load(self.folder / _START, rank)
        self.start_extra = self.extra = self.extra_after = extra
        self.start = Weights.start(_with_prefix(start, _PARAMETER), rule)
        self.weights = self.start
        self.start_buffers = self.buffers = _with_prefix(start, f"{_BUFFER}{rank}/")
        self.gradients: Tensors = {}
        self.buffers_after: Tensors = {}
        self.weights_after = self.start

    def read(self, step: int) -> None:
        """Read a step; the caller reads steps in their order."""
        self.extra = self.extra_after
        tensors, self.extra_after = _load(self.folder / _step_file(step), self.rank)
        self.weights, self.buffers = self.weights_after, self.buffers_after or self.start_buffers
        self.gradients = _with_prefix(tensors, _GRADIENT)
        self.buffers_after = _with_prefix(tensors, f"{_BUFFER}{self.rank}/")
        self.weights_after = self.weights.after(self.rule, self.gradients)

    @property
    def state(self) -> TrainingState:
        """State before the step that was read."""
        return _state(self.weights, self.buffers, set(self.gradients), self.extra)

    @property
    def start_state(self) -> TrainingState:
        """State before the first step."""
        return _state(self.start, self.start_buffers, set(self.gradients), self.start_extra)

    @property
    def state_after(self) -> TrainingState:
        """State after the step that was read."""
        return _state(self.weights_after, self.buffers_after, set(self.gradients), self.extra_after)


def _state(
    weights: Weights, buffers: Tensors, trained: set[str], extra: dict[str, Any]
) -> TrainingState:
    optimizer_state = {
        name: {
            "step": torch.tensor(float(weights.num_steps[name])),
            **weights.state[name],
        }
        for name in trained
    }
    scaler = {"scale": LOSS_SCALE, "growth_tracker": 0.0}
    return TrainingState({**weights.parameters, **buffers}, optimizer_state, scaler, extra)
