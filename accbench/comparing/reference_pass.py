"""The reference pass: the same training in float64 by a model loop, which engines are held against.

It uses one process, no engine and no process group: the loop computes the shards of all ranks one
after the other and averages their gradients. After every step it rounds the weights to float32, so
that an engine can load exactly the state that the next step begins in. `reference_files` has what
it stores. The twin for a user's script is `script_reference_pass`.
"""

import dataclasses
import math
import shutil
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accbench import models
from accbench.comparing import (
    merged_batches,
    pieces,
    reference_cache,
    reference_files,
    shared_dropout,
    update_rules,
)
from accbench.comparing.reference_files import FOLDER, RankState, ReferenceFacts
from accbench.comparing.update_rules import Rule, Weights
from accbench.config import TaskConfig
from accbench.data import nested
from accbench.distributed import complex_numbers
from accbench.distributed.process_group import Topology
from accbench.engines import Batch
from accbench.engines.common import model_state, tied_parameters
from accbench.engines.common.training_state import Tensors
from accbench.models.tasks import trainable
from accbench.recording import records
from accbench.recording.logger import RunLogger
from accbench.training import label_counts

DRAWS_OTHERWISE = "the model draws random numbers that cannot be given to all engines"


def epochs(loader: Any, batches: Any) -> Generator[Batch, None, None]:
    """Yield the batches of one epoch after the other, endlessly.

    Args:
        loader: a data loader.
        batches: function of the loader that yields an epoch's batches.
    """
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


class _Float64Model:
    """The float64 model of all shards: shared weights; buffers and extra state for each shard."""

    def __init__(self, task: TaskConfig, num_classes: int, num_shards: int, rule: Rule) -> None:
        self.task, self.spec, self.rule = task, models.of_task(task), rule
        torch.manual_seed(task.seed)
        net = trainable.plain(self.spec.build(num_classes))
        self.parameters = dict(net.named_parameters())
        start = {name: tensor.detach().clone() for name, tensor in self.parameters.items()}
        self.weights = Weights.start(start, rule)
        self.ranks = [
            RankState(
                {name: tensor.clone() for name, tensor in net.named_buffers()},
                model_state.read_extra(net),
            )
            for _ in range(num_shards)
        ]
        cuda = task.device == "cuda" and torch.cuda.is_available()
        self.device = torch.device("cuda" if cuda else "cpu")
        locations = tied_parameters.find_ties(net)
        self.net = complex_numbers.double(net.to(self.device))
        tied_parameters.restore_ties(locations)
        self.parameters = dict(self.net.named_parameters())

    def send(self, batch: Batch) -> Batch:
        """Move a batch to the device and convert its float32 tensors to float64."""
        return nested.mapped(batch, lambda t: complex_numbers.doubled(t.to(self.device)))

    def load_weights(self) -> None:
        """Copy the weights, which all ranks share, into the model."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.weights.parameters[name])

    def load_rank(self, rank: int) -> None:
        """Copy a rank's buffers and extra state into the model."""
        with torch.no_grad():
            for name, buffer in self.net.named_buffers():
                buffer.copy_(self.ranks[rank].buffers[name])
        model_state.load_extra(self.net, self.ranks[rank].extra)

    def keep_rank(self, rank: int) -> None:
        """Keep a rank's buffers and extra state, as the model has them."""
        buffers = {
            name: complex_numbers.singled(b).detach().to("cpu", copy=True)
            for name, b in self.net.named_buffers()
        }
        self.ranks[rank] = RankState(buffers, model_state.read_extra(self.net, wide=False))

    def add_gradients(self, batch: Batch, sums: Tensors) -> float:
        """Compute the mean loss of a batch, and add the gradients of the parameters that have any.

        Args:
            batch: a batch on the host.
            sums: parameter -> float64 on the host, to which the gradients are added.
        """
        trained = {n: p for n, p in self.parameters.items() if p.requires_grad}
        mean_loss = 0.0
        parts = nested.chunks(self.send(batch), self.task.accumulate)
        for part in parts:
            loss = self.spec.loss(self.net, part) / len(parts)
            gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
            mean_loss += loss.item()
            for name, gradient in zip(trained, gradients, strict=True):
                if gradient is not None and name in sums:
                    sums[name] += gradient.cpu()
                elif gradient is not None:  # autograd may give one tensor for two parameters
                    sums[name] = gradient.to("cpu", copy=True)
        return mean_loss

    @torch.no_grad()
    def score(self, batch: Batch) -> float:
        self.net.eval()
        scores = self.spec.score(self.net, self.send(batch))
        self.net.train()
        return float(scores[0].item())


def run(
    task: TaskConfig, num_shards: int, reuses: bool = False, workers_per_batch: int = 1,
    drops: bool = True,
) -> None:  # fmt: skip
    """Make a reference in the run's folder, and write its losses into the record.

    Args:
        task: what to train.
        num_shards: the number of different batches a step that engines will train with.
        reuses: whether to take one that was kept, and to keep this one.
        workers_per_batch: ranks that will share each of them; of several, nothing is dropped.
        drops: whether dropout drops.
    """
    assert task.max_steps is not None
    logger = RunLogger(task.run_dir)
    facts, was_kept = _train(
        task, num_shards, task.run_dir / FOLDER, reuses, workers_per_batch, drops
    )
    if was_kept:
        logger.write(records.NumericsRecord(reference_cache.KEPT, 0, {}))
    for step, losses in enumerate(facts.losses):
        logger.write(
            records.NumericsRecord(
                phase="reference", step=step + 1, distances={},
                loss=records.finite_or_none(sum(losses) / len(losses)),
                note=DRAWS_OTHERWISE if facts.draws_otherwise else None,
            )
        )  # fmt: skip
    logger.write(records.EndRecord("ok", num_steps=task.max_steps))


def _train(
    task: TaskConfig, num_shards: int, folder: Path, reuses: bool, workers_per_batch: int,
    drops: bool,
) -> tuple[ReferenceFacts, bool]:  # fmt: skip
    """Write the reference into `folder`: one that was kept, or `--max_steps` steps of training.

    Returns:
        The reference's facts, and whether it was kept.
    """
    shards = [Topology(rank, rank, num_shards, num_shards) for rank in range(num_shards)]
    shard_sources = merged_batches.sources(task, shards, workers_per_batch)
    rule = update_rules.of_task(task)
    model = _Float64Model(task, shard_sources[0].num_classes, num_shards, rule)
    loaders = [source.train_loader() for source in shard_sources]
    streams = [epochs(loader, _host_batches) for loader in loaders]
    steps: Iterator[Sequence[Batch]] = islice(zip(*streams, strict=True), task.max_steps)
    if num_shards * task.accumulate > 1 and label_counts.may_differ(model.spec, shard_sources[0]):
        steps = map(partial(label_counts.of_parts, model.spec), steps)
    key = None
    if reuses:
        key, steps = _key_and_steps(task, model, num_shards * workers_per_batch, drops, steps)
    if key is not None and reference_cache.fetch(key, folder):
        return reference_files.read_facts(folder), True
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    reference_files.save_start(folder, model.weights.parameters, model.ranks)
    with shared_dropout.shared_dropout(drops=workers_per_batch == 1 and drops):
        facts = _train_steps(task, model, steps, folder, key)
    facts = dataclasses.replace(facts, workers_per_batch=workers_per_batch, is_undropped=not drops)
    reference_files.write_facts(folder, facts)
    if key is not None:
        reference_cache.store(key, folder)
    return facts, False


def _key_and_steps(
    task: TaskConfig, model: _Float64Model, num_shards: int, drops: bool,
    steps: Iterator[Sequence[Batch]],
) -> tuple[str | None, Iterator[Sequence[Batch]]]:  # fmt: skip
    """Return the reference's name in the cache, and the batches of its steps once more.

    The batches are part of the name. So they are all read before, unless they are too large.
    """
    read = list(islice(steps, 1))
    num_bytes = sum(t.nbytes for batch in read[0] for t in nested.tensors_of(batch))
    if num_bytes * (task.max_steps or 0) > reference_cache.MAX_BATCH_BYTES:
        return None, chain(read, steps)
    read += steps
    batches = chain.from_iterable(read)
    key = reference_cache.key(task, num_shards, drops, model.net, model.spec, batches)
    return key, iter(read)


def _train_steps(
    task: TaskConfig, model: _Float64Model, steps: Iterator[Sequence[Batch]], folder: Path,
    key: str | None,
) -> ReferenceFacts:  # fmt: skip
    losses: list[list[float]] = []
    first_batches: list[Batch] = []
    for step, batches in enumerate(steps):
        if not first_batches:
            first_batches = list(batches)
            draws, draws_otherwise = _learn_draws(task, model, first_batches[0])
        sums: Tensors = {}
        losses.append([])
        model.load_weights()
        for rank, batch in enumerate(batches):
            model.load_rank(rank)
            draws.begin(step, rank, model.send)
            losses[-1].append(model.add_gradients(batch, sums))
            model.keep_rank(rank)
        for total in sums.values():
            total /= len(batches)
        averaged = _clipped(sums, task.clip_norm)
        reference_files.save_step(folder, step, averaged, model.ranks)
        model.weights = model.weights.after(model.rule, averaged)
    scores = []
    model.load_weights()
    for rank, batch in enumerate(first_batches):
        model.load_rank(rank)
        scores.append(model.score(batch))
    assert task.batch_size is not None
    return ReferenceFacts(
        losses, scores, [list(shape) for shape in draws.shapes or ()],
        _probabilities(model.net), draws_otherwise, task.batch_size, cache_key=key,
    )  # fmt: skip


def _clipped(gradients: Tensors, max_norm: float | None) -> Tensors:
    """Clip gradients as `torch.nn.utils.clip_grad_norm_` does, and round them to float32."""
    if max_norm is not None:
        values = (v for gradient in gradients.values() for (v,) in pieces.in_float64([gradient]))
        squares = sum(pieces.square_sum(piece) for piece in values)
        factor = min(1.0, max_norm / (math.sqrt(squares) + 1e-6))
        for gradient in gradients.values():
            gradient *= factor
    return {name: complex_numbers.singled(gradient) for name, gradient in gradients.items()}


def _learn_draws(
    task: TaskConfig, model: _Float64Model, batch: Batch
) -> tuple[shared_dropout.Draws, bool]:
    """Record a forward pass's dropout, and whether the model draws other random numbers."""
    model.load_weights()
    model.load_rank(0)
    draws = shared_dropout.Draws(task.seed)
    before = _generator_states(model.device)
    draws.learn(lambda: model.add_gradients(batch, {}))
    after = _generator_states(model.device)
    return draws, any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def _generator_states(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _probabilities(net: nn.Module) -> list[float]:
    """Return the probabilities of the model's dropout layers, to check an engine's dropout with."""
    layers = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
    probabilities = {module.p for module in net.modules() if isinstance(module, layers)}
    attention = {m.dropout for m in net.modules() if isinstance(m, nn.MultiheadAttention)}
    return sorted(p for p in probabilities | attention if 0 < p < 1)
