"""Batches of several workers as one, for rows whose workers share a batch (`--tp`, `--cp`).

What is equal in a comparison is the global batch. Where k workers share a batch it is k times as
large, and consists of those that k workers have without sharing, in the order of their ranks.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from accbench import config
from accbench.config import TaskConfig, plugins
from accbench.data import nested
from accbench.distributed.process_group import Topology
from accbench.engines import Batch


class MergedLoader:
    """A training loader whose batches are those of several loaders, one behind the other."""

    num_done = 0

    def __init__(self, loaders: Sequence[Any]) -> None:
        self.loaders = loaders
        self.resident: bool = loaders[0].resident
        self.transform: Callable[[Batch], Batch] = lambda batch: batch

    def __len__(self) -> int:
        return min(map(len, self.loaders))

    def set_epoch(self, epoch: int) -> None:
        for loader in self.loaders:
            loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[Batch]:
        for batches in zip(*self.loaders, strict=True):
            tensors = zip(*map(nested.tensors_of, batches), strict=True)
            merged = nested.with_tensors(batches[0], [torch.cat(parts) for parts in tensors])
            yield self.transform(merged)


class MergedSource:
    """A data source of the workers that share a batch."""

    def __init__(self, sources: Sequence[Any]) -> None:
        self.sources = sources
        self.num_classes: int = sources[0].num_classes
        self.ignores_labels: bool = getattr(sources[0], "ignores_labels", True)

    def train_loader(self) -> Any:
        """Return a loader of their batches together."""
        loaders = [source.train_loader() for source in self.sources]
        return loaders[0] if len(loaders) == 1 else MergedLoader(loaders)


def sources(task: TaskConfig, shards: Sequence[Topology], workers_per_batch: int = 1) -> list[Any]:
    """Return the data source of each shard.

    Args:
        task: its batch size is that of a shard.
        shards: topologies that count shards.
        workers_per_batch: the workers that share a batch.
    """
    name, location = config.data_name(task.data)
    source, options = plugins.load("data", name), task.options.get(name)
    assert task.batch_size is not None
    of_worker = dataclasses.replace(task, batch_size=task.batch_size // workers_per_batch)

    def of_shard(shard: Topology) -> MergedSource:
        world_size = shard.world_size * workers_per_batch
        first = shard.rank * workers_per_batch
        ranks = range(first, first + workers_per_batch)
        workers = [dataclasses.replace(shard, rank=r, world_size=world_size) for r in ranks]
        return MergedSource([source(location, of_worker, options, worker) for worker in workers])

    return [of_shard(shard) for shard in shards]
