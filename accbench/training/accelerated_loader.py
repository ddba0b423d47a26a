"""A user's loader, whose batches come on the device; each rank's share of its samples."""

import copy
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any, Protocol

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
from torch.utils.data import SequentialSampler as InOrder

from accbench.data import shared_memory
from accbench.data.loader import naming_dead_workers
from accbench.data.samplers import DistributedSampler
from accbench.distributed.process_group import Topology
from accbench.engines import Batch
from accbench.engines.loops import LoopEngine
from accbench.errors import RequestError
from accbench.training.gathering import BatchPosition


class Passes(Protocol):
    """Is told of each pass over a loader."""

    engine: LoopEngine

    def batches(self, loader: "Loader", on_device: Iterator[Batch]) -> Iterator[Batch]:
        """The batches as the loop gets them."""


class Loader:
    """Batches on the device. Everything else is the user's loader's own.

    Where that has worker processes, it is read ahead of the loop. One without is read in the
    loop's own thread, so that random numbers are drawn in the order of a plain loop.
    """

    def __init__(self, loader: Any, passes: Passes, sampler: "_OfRank | None") -> None:
        self.loader, self._passes, self._sampler = loader, passes, sampler
        self.epoch = 0
        """Of the next pass, which a sampler made here shuffles by."""

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # in the midst of unpickling there is none
            raise AttributeError(name)
        return getattr(self.loader, name)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle the next pass by this number; passes count by themselves as well."""
        self.epoch = epoch
        for one in (self.loader, getattr(self.loader, "sampler", None)):
            set_epoch = getattr(one, "set_epoch", None)
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
        inner = getattr(self.loader, "batch_sampler", None)
        samplers = (getattr(self.loader, "sampler", None), inner, getattr(inner, "sampler", None))
        found = (one for one in samplers if hasattr(one, "num_replicas"))
        return BatchPosition(next(found, None))

    def _on_device(self) -> Generator[Batch, None, None]:
        engine = self._passes.engine
        if getattr(self.loader, "num_workers", 0):
            with shared_memory.explained():
                on_host = naming_dead_workers(self._on_host())
            with closing(engine.stream(on_host)) as batches:  # type: ignore[type-var]
                yield from batches
        else:
            for batch in self._on_host():
                yield engine.to_device(batch)

    def _on_host(self) -> Iterator[Any]:
        batches = iter(self.loader)
        if self._sampler is None:
            return batches
        return _by_the_sampler(batches, self._sampler, self.loader)


class _OfRank(DistributedSampler):
    """Knows whether a loader has taken samples from it."""

    was_asked = False

    def __iter__(self) -> Iterator[int]:
        self.was_asked = True
        return super().__iter__()


def of_rank(loader: Any, topology: Topology, seed: int) -> tuple[Any, _OfRank | None]:
    """A loader of this rank's part of the samples, and the sampler that was made for it.

    Raises:
        RequestError: it cannot be shared out.
    """
    if topology.world_size == 1:
        return loader, None
    sampler = getattr(loader, "sampler", None)
    if any(hasattr(one, "num_replicas") for one in (sampler, getattr(loader, "batch_sampler", 0))):
        return loader, None
    why = _why_whole(loader, sampler)
    if why is not None:
        raise RequestError(
            f"{why} cannot be shared out over {topology.world_size} workers: give its DataLoader "
            "a sampler of accbench.data.samplers that is distributed, or have each worker load "
            "samples of its own and say sharded=True"
        )
    shuffle = isinstance(sampler, RandomSampler)
    shared = _OfRank(loader.dataset, topology.world_size, topology.rank, shuffle=shuffle, seed=seed)
    return _with_sampler(loader, shared), shared


def _with_sampler(loader: DataLoader[Any], sampler: DistributedSampler) -> DataLoader[Any]:
    """Return a copy of the loader, of its own class and with all its attributes, that takes its
    samples from `sampler`.

    One built anew from a list of arguments would lose what a subclass does to its batches
    (huggingface/accelerate#3322).
    """
    other = copy.copy(loader)
    batches = BatchSampler(sampler, loader.batch_size or 1, loader.drop_last)
    # DataLoader lets nobody set these after its constructor; the copy has not been read yet.
    vars(other).update(sampler=sampler, batch_sampler=batches, _iterator=None)
    return other


def _by_the_sampler(batches: Iterator[Any], sampler: "_OfRank", loader: Any) -> Iterator[Any]:
    """Pass batches through.

    Raises:
        RequestError: the first comes without the sampler having been asked for samples, so that
            each worker would train on all of them.
    """
    for batch in batches:
        if not sampler.was_asked:
            raise RequestError(
                f"a {type(loader).__name__} that takes its samples past its sampler cannot be "
                "shared out over workers: have it iterate over its batch_sampler, or have each "
                "worker load samples of its own and say sharded=True"
            )
        yield batch


def _why_whole(loader: Any, sampler: Any) -> str | None:
    """What of a loader only its maker knows how to share out; None if it can be."""
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__}"
    if isinstance(loader.dataset, IterableDataset):
        return f"the iterable dataset {type(loader.dataset).__name__}"
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        return f"a DataLoader with the batch sampler {type(loader.batch_sampler).__name__}"
    if isinstance(sampler, RandomSampler):
        whole = not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
        return None if whole else "a DataLoader that draws with replacement, or a part"
    return None if type(sampler) is InOrder else f"the sampler {type(sampler).__name__}"
