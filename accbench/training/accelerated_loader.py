"""A user's data loader, sharded over the ranks, with its batches moved to the device."""

import contextlib
import copy
import weakref
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any, Protocol

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
from torch.utils.data import SequentialSampler as InOrder

from accbench.data import shared_memory
from accbench.data.loader import name_dead_workers
from accbench.data.samplers import DistributedSampler
from accbench.distributed.process_group import Topology
from accbench.engines import Batch
from accbench.engines.loops import LoopEngine
from accbench.errors import RequestError
from accbench.training.gathering import BatchPosition


class PassListener(Protocol):
    """Listener for each pass over a loader."""

    engine: LoopEngine

    def batches(self, loader: "AcceleratedLoader", on_device: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches of one pass as the loop gets them."""


class AcceleratedLoader:
    """A user's loader with its batches on the device; other attributes are the loader's.

    A loader with worker processes is read ahead of the loop. One without is read in the loop's own
    thread, so that random numbers are drawn in the order of a plain loop.
    """

    def __init__(self, loader: Any, passes: PassListener, sampler: "_RankSampler | None") -> None:
        self.loader, self._passes, self._sampler = loader, passes, sampler
        self.epoch = 0
        """Epoch of the next pass, by which a sampler made here shuffles."""
        self._stream: weakref.ref[Any] | None = None
        """Batches of the last pass over a loader with worker processes."""

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # during unpickling it does not exist yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    def set_epoch(self, epoch: int) -> None:
        """Set the number that shuffles the next pass; passes also count by themselves."""
        self.epoch = epoch
        for candidate in (self.loader, getattr(self.loader, "sampler", None)):
            set_epoch = getattr(candidate, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)

    def __iter__(self) -> Iterator[Batch]:
        if self._sampler is not None:
            self._sampler.set_epoch(self.epoch)
        self.epoch += 1
        return self._passes.batches(self, self._on_device())

    @property
    def position(self) -> BatchPosition:
        """A count of batches for a new pass, for `Run.gather`."""
        return BatchPosition(_distributed_sampler(self.loader), *_batch_sizes(self.loader))

    def _on_device(self) -> Generator[Batch, None, None]:
        engine = self._passes.engine
        if getattr(self.loader, "num_workers", 0):
            earlier = self._stream() if self._stream is not None else None
            if earlier is not None and getattr(self.loader, "persistent_workers", False):
                earlier.close()  # its thread would take batches of this pass
            with shared_memory.explained():
                on_host = name_dead_workers(self._on_host())
                shared_memory.explain_signals()
            with closing(engine.stream(on_host)) as batches:  # type: ignore[type-var]
                self._stream = weakref.ref(batches)
                yield from batches
        else:
            for batch in self._on_host():
                yield engine.to_device(batch)

    def _on_host(self) -> Iterator[Any]:
        batches = iter(self.loader)
        if self._sampler is None:
            return batches
        return _check_sampler_used(batches, self._sampler, self.loader)


class _RankSampler(DistributedSampler):
    """A distributed sampler that records whether a loader has taken samples from it."""

    was_iterated = False

    def __iter__(self) -> Iterator[int]:
        self.was_iterated = True
        return super().__iter__()


def shard_loader(loader: Any, topology: Topology, seed: int) -> tuple[Any, _RankSampler | None]:
    """Shard a loader: return a loader of this rank's samples, and the sampler made for it.

    Raises:
        RequestError: it cannot be sharded, or has a sampler of another worker's samples.
    """
    distributed = _distributed_sampler(loader)
    if distributed is not None:
        _check_ranks(distributed, topology)
        return loader, None
    if topology.world_size == 1:
        return loader, None
    sampler = getattr(loader, "sampler", None)
    why = _why_not_shardable(loader, sampler)
    if why is not None:
        raise RequestError(
            f"{why} cannot be shared out over {topology.world_size} workers: give its DataLoader "
            "a sampler of accbench.data.samplers that is distributed, or have each worker load "
            "samples of its own and say sharded=True"
        )
    shuffle = isinstance(sampler, RandomSampler)
    shard = _RankSampler(
        loader.dataset, topology.world_size, topology.rank, shuffle=shuffle, seed=seed
    )
    return _with_sampler(loader, shard), shard


def _batch_sizes(loader: Any) -> tuple[int | None, int | None]:
    """Return a loader's batch size, and its samples in an epoch; None for what is not known."""
    batches = getattr(loader, "batch_sampler", None)
    batch_size = getattr(loader, "batch_size", None) or getattr(batches, "batch_size", None)
    num_samples = None
    if type(batches) is BatchSampler:
        with contextlib.suppress(TypeError, NotImplementedError):  # a sampler without a length
            num_samples = len(batches.sampler)  # type: ignore[arg-type]
    return batch_size if isinstance(batch_size, int) else None, num_samples


def _distributed_sampler(loader: Any) -> Any:
    """Return the distributed sampler of a loader or of its batch sampler; None if it has none."""
    batches = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    distributed = (s for s in samplers if getattr(s, "num_replicas", None) is not None)
    return next(distributed, None)


def _check_ranks(sampler: Any, topology: Topology) -> None:
    """Check that a distributed sampler gives this worker's samples.

    Raises:
        RequestError: it is for another number of workers, or for another one of them.
    """
    here, size = topology.rank, topology.world_size
    rank = getattr(sampler, "rank", here)  # some samplers do not show it
    if (sampler.num_replicas, rank) != (size, here):
        raise RequestError(
            f"the loader's {type(sampler).__name__} is for rank {rank} of {sampler.num_replicas}, "
            f"and this worker is rank {here} of {size}: leave the sampler out, as accelerate "
            f"shares out a plain DataLoader, build it with num_replicas={size} and rank={here}, "
            "or say sharded=True if it is meant so"
        )


def _with_sampler(loader: DataLoader[Any], sampler: DistributedSampler) -> DataLoader[Any]:
    """Return a copy of the loader that takes its samples from `sampler`.

    The copy is of the loader's own class and has all its attributes. A loader rebuilt from a list
    of arguments would lose what a subclass does to its batches (huggingface/accelerate#3322).
    """
    other = copy.copy(loader)
    batches = BatchSampler(sampler, loader.batch_size or 1, loader.drop_last)
    # DataLoader refuses to set these after its constructor; the copy has not been read yet.
    vars(other).update(sampler=sampler, batch_sampler=batches, _iterator=None)
    return other


def _check_sampler_used(
    batches: Iterator[Any], sampler: "_RankSampler", loader: Any
) -> Iterator[Any]:
    """Pass batches through, and check that the loader uses the sampler.

    Raises:
        RequestError: the first batch came without a sample from the sampler, so that each worker
            would train on all samples.
    """
    for batch in batches:
        if not sampler.was_iterated:
            raise RequestError(
                f"a {type(loader).__name__} that takes its samples past its sampler cannot be "
                "shared out over workers: have it iterate over its batch_sampler, or have each "
                "worker load samples of its own and say sharded=True"
            )
        yield batch


def _why_not_shardable(loader: Any, sampler: Any) -> str | None:
    """Describe why a loader cannot be sharded here; return None if it can be."""
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__}"
    if isinstance(loader.dataset, IterableDataset):
        return f"the iterable dataset {type(loader.dataset).__name__}"
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        return f"a DataLoader with the batch sampler {type(loader.batch_sampler).__name__}"
    if isinstance(sampler, RandomSampler):
        draws_all = not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
        return None if draws_all else "a DataLoader that draws with replacement, or a part"
    return None if type(sampler) is InOrder else f"the sampler {type(sampler).__name__}"
