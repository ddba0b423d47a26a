"""What the numerics pass holds engines against: the same training in float64, by a plain loop.

One process, no engine, no process group: the shards of all ranks one after the other, their
gradients averaged by hand. After every step the weights are rounded to float32, so that an
engine can be put into exactly the state that the next step begins in. Kept on disk are the
weights at the start, and of each step its gradients and the buffers after it.
"""

import dataclasses
import json
import math
import shutil
from collections.abc import Generator, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from accbench import config, models
from accbench.comparing import dropout, update_rules
from accbench.comparing.update_rules import Rule, Weights
from accbench.config import TaskConfig, plugins
from accbench.data import nested
from accbench.distributed.process_group import Topology
from accbench.engines import Batch
from accbench.engines.common import (
    complex_numbers,
    extra_state,
    model_state,
    tied_parameters,
)
from accbench.engines.common.training_state import Tensors, TrainingState
from accbench.errors import RequestError
from accbench.models.tasks import trainable

FOLDER = "reference"
_FACTS, _START = "facts.json", "start.safetensors"
_PARAMETER, _GRADIENT, _BUFFER, _EXTRA = "parameter/", "gradient/", "buffer/", "extra/"
# The loss scale that float16 steps start from: nothing overflows, and little is lost below.
LOSS_SCALE = 1024.0


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a reference beside its tensors."""

    losses: list[list[float]]
    """Step -> rank -> the loss of its shard."""
    scores: list[float]
    """Rank -> the summed loss of its first batch, evaluated after the last step."""
    dropout_shapes: list[list[int]]
    """Of the random numbers that each call in a forward pass takes."""
    dropout_probabilities: list[float]
    """Of the model's dropout layers, each once."""
    draws_otherwise: bool
    """Whether the model draws random numbers that cannot be given to all engines."""
    batch_size: int = 0


def sources(task: TaskConfig, shards: list[Topology]) -> list[Any]:
    """The data of each shard."""
    name, location = config.data_name(task.data)
    source = plugins.load("data", name)
    return [source(location, task, task.options.get(name), shard) for shard in shards]


def epochs(loader: Any, batches: Any) -> Generator[Batch, None, None]:
    """`batches(loader)` of one epoch after the other."""
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        yield from batches(loader)
        epoch += 1


def _host_batches(loader: Any) -> Iterator[Batch]:
    yield from islice(_cycled(loader), len(loader)) if loader.resident else loader


def _cycled(loader: Any) -> Iterator[Batch]:
    while True:
        yield from loader


class _Plain:
    """The float64 model of all shards: one set of weights, buffers and extra state of each."""

    def __init__(self, task: TaskConfig, num_classes: int, num_shards: int, rule: Rule) -> None:
        self.task, self.spec = task, models.of_task(task)
        torch.manual_seed(task.seed)
        net = trainable.plain(self.spec.build(num_classes))
        self.parameters = dict(net.named_parameters())
        start = {name: tensor.detach().clone() for name, tensor in self.parameters.items()}
        self.weights = Weights.start(start, rule)
        self.buffers: list[Tensors] = [
            {name: tensor.clone() for name, tensor in net.named_buffers()}
            for _ in range(num_shards)
        ]
        self.extra = [model_state.read_extra(net) for _ in range(num_shards)]
        cuda = task.device == "cuda" and torch.cuda.is_available()
        self.device = torch.device("cuda" if cuda else "cpu")
        places = tied_parameters.find_ties(net)
        self.net = complex_numbers.double(net.to(self.device))
        tied_parameters.restore_ties(places)
        self.parameters = dict(self.net.named_parameters())

    def send(self, batch: Batch) -> Batch:
        """What engines would compute with in float32 is float64 here."""
        return nested.mapped(batch, lambda t: complex_numbers.doubled(t.to(self.device)))

    def place(self, rank: int) -> None:
        """Put the weights and a rank's buffers into the model."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.weights.parameters[name])
            for name, buffer in self.net.named_buffers():
                buffer.copy_(self.buffers[rank][name])
        model_state.load_extra(self.net, self.extra[rank])

    def keep_buffers(self, rank: int) -> None:
        self.buffers[rank] = {
            name: complex_numbers.singled(b).detach().to("cpu", copy=True)
            for name, b in self.net.named_buffers()
        }
        self.extra[rank] = model_state.read_extra(self.net, wide=False)

    def loss_and_gradients(self, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
        """Gradients of those that have any, on the host."""
        trained = {n: p for n, p in self.parameters.items() if p.requires_grad}
        sums: dict[str, torch.Tensor] = {}
        mean_loss = 0.0
        parts = nested.chunks(self.send(batch), self.task.accumulate)
        for part in parts:
            loss = self.spec.loss(self.net, part) / len(parts)
            found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
            mean_loss += loss.item()
            for name, gradient in zip(trained, found, strict=True):
                if gradient is not None:
                    sums[name] = sums.get(name, 0) + gradient.cpu()
        return mean_loss, sums

    @torch.no_grad()
    def score(self, batch: Batch) -> float:
        self.net.eval()
        scores = self.spec.score(self.net, self.send(batch))
        self.net.train()
        return float(scores[0].item())


def make(task: TaskConfig, num_shards: int, num_steps: int, run_dir: Path) -> Facts:
    """Train `num_steps` steps and leave the reference in `run_dir`."""
    shards = [Topology(rank, rank, num_shards, num_shards) for rank in range(num_shards)]
    of_shards = sources(task, shards)
    rule = update_rules.of_task(task)
    plain = _Plain(task, of_shards[0].num_classes, num_shards, rule)
    folder = run_dir / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _save(folder / _START, {_PARAMETER: plain.weights.parameters}, plain)
    with dropout.given():
        loaders = [source.train_loader() for source in of_shards]
        streams = [epochs(loader, _host_batches) for loader in loaders]
        losses: list[list[float]] = []
        first: list[Batch] = []
        for step, batches in enumerate(islice(zip(*streams, strict=True), num_steps)):
            if not first:
                first = list(batches)
                draws, draws_otherwise = _learn_draws(task, plain, first[0])
            sums: dict[str, torch.Tensor] = {}
            losses.append([])
            for rank, batch in enumerate(batches):
                plain.place(rank)
                draws.begin(step, rank, plain.send)
                loss, gradients = plain.loss_and_gradients(batch)
                plain.keep_buffers(rank)
                losses[-1].append(loss)
                for name, gradient in gradients.items():
                    sums[name] = sums[name] + gradient if name in sums else gradient
            averaged = _clipped(
                {n: total / num_shards for n, total in sums.items()}, task.clip_norm
            )
            _save(folder / _step_file(step), {_GRADIENT: averaged}, plain)
            plain.weights = plain.weights.after(rule, averaged)
        scores = []
        for rank, batch in enumerate(first):
            plain.place(rank)
            scores.append(plain.score(batch))
    assert task.batch_size is not None
    facts = Facts(
        losses, scores, [list(shape) for shape in draws.shapes or ()],
        _probabilities(plain.net), draws_otherwise, task.batch_size,
    )  # fmt: skip
    (folder / _FACTS).write_text(json.dumps(dataclasses.asdict(facts)) + "\n", encoding="utf-8")
    return facts


def _clipped(gradients: Tensors, max_norm: float | None) -> Tensors:
    """In float32, as `torch.nn.utils.clip_grad_norm_` leaves them."""
    factor = 1.0
    if max_norm is not None:
        squares = sum(
            float(complex_numbers.wide(gradient).square().sum()) for gradient in gradients.values()
        )
        factor = min(1.0, max_norm / (math.sqrt(squares) + 1e-6))
    return {
        name: complex_numbers.singled(factor * gradient) for name, gradient in gradients.items()
    }


def _learn_draws(task: TaskConfig, plain: _Plain, batch: Batch) -> tuple[dropout.Draws, bool]:
    """The dropout of a forward pass, and whether the model draws in other ways as well."""
    plain.place(0)
    draws = dropout.Draws(task.seed)
    before = _generator_states(plain.device)
    draws.learn(lambda: plain.loss_and_gradients(batch))
    after = _generator_states(plain.device)
    return draws, any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def _generator_states(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _probabilities(net: nn.Module) -> list[float]:
    """Of its dropout layers: what an engine's own dropout is tried with."""
    layers = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
    found = {module.p for module in net.modules() if isinstance(module, layers)}
    attention = {m.dropout for m in net.modules() if isinstance(m, nn.MultiheadAttention)}
    return sorted(p for p in found | attention if 0 < p < 1)


def _step_file(step: int) -> str:
    return f"step-{step:04}.safetensors"


def _save(path: Path, groups: dict[str, Tensors], plain: _Plain) -> None:
    tensors = {
        prefix + name: tensor.contiguous()
        for prefix, group in groups.items()
        for name, tensor in group.items()
    }
    metadata: dict[str, str] = {}
    for rank, of_rank in enumerate(plain.buffers):
        tensors |= {f"{_BUFFER}{rank}/{name}": tensor for name, tensor in of_rank.items()}
        extra: list[torch.Tensor] = []
        packed = {key: extra_state.pack(v, extra) for key, v in plain.extra[rank].items()}
        metadata[str(rank)] = json.dumps(packed)
        tensors |= {f"{_EXTRA}{rank}/{number}": tensor for number, tensor in enumerate(extra)}
    try:
        save_file(complex_numbers.as_real(tensors), path, metadata)
    except (OSError, SafetensorError) as error:
        raise RequestError(f"cannot write {path}: {error}") from None


def _load(path: Path, rank: int) -> tuple[Tensors, dict[str, Any]]:
    """(tensors, a rank's extra state)"""
    tensors = complex_numbers.as_complex(load_file(path))
    with safe_open(path, "pt") as file:
        packed = json.loads(file.metadata()[str(rank)])
    extra = _of(tensors, f"{_EXTRA}{rank}/")
    in_order = [extra[str(number)] for number in range(len(extra))]
    return tensors, {key: extra_state.unpack(one, in_order) for key, one in packed.items()}


def _of(tensors: Tensors, prefix: str) -> Tensors:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


class Reference:
    """A reference as one rank reads it, step by step."""

    def __init__(self, run_dir: Path, rule: Rule, rank: int) -> None:
        self.folder, self.rule, self.rank = run_dir / FOLDER, rule, rank
        try:
            self.facts = Facts(**json.loads((self.folder / _FACTS).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise RequestError(f"no reference in {self.folder}: {error}") from None
        start, extra = _load(self.folder / _START, rank)
        self.start_extra = self.extra = self.extra_after = extra
        self.start = Weights.start(_of(start, _PARAMETER), rule)
        self.weights = self.start
        self.start_buffers = self.buffers = _of(start, f"{_BUFFER}{rank}/")
        self.gradients: Tensors = {}
        self.buffers_after: Tensors = {}
        self.weights_after = self.start

    def read(self, step: int) -> None:
        """Get ready for a step; steps are read in their order."""
        self.extra = self.extra_after
        tensors, self.extra_after = _load(self.folder / _step_file(step), self.rank)
        self.weights, self.buffers = self.weights_after, self.buffers_after or self.start_buffers
        self.gradients = _of(tensors, _GRADIENT)
        self.buffers_after = _of(tensors, f"{_BUFFER}{self.rank}/")
        self.weights_after = self.weights.after(self.rule, self.gradients)

    @property
    def state(self) -> TrainingState:
        """Before the step that was read."""
        return _state(self.weights, self.buffers, set(self.gradients), self.extra)

    @property
    def start_state(self) -> TrainingState:
        """Before the first step."""
        return _state(self.start, self.start_buffers, set(self.gradients), self.start_extra)

    @property
    def state_after(self) -> TrainingState:
        """After the step that was read."""
        return _state(self.weights_after, self.buffers_after, set(self.gradients), self.extra_after)


def _state(
    weights: Weights, buffers: Tensors, trained: set[str], extra: dict[str, Any]
) -> TrainingState:
    of_optimizer = {
        name: {
            "step": torch.tensor(float(weights.num_steps[name])),
            **weights.state[name],
        }
        for name in trained
    }
    scaler = {"scale": LOSS_SCALE, "growth_tracker": 0.0}
    return TrainingState({**weights.parameters, **buffers}, of_optimizer, scaler, extra)
