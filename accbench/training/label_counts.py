"""Labels of a step, counted over micro-batches and ranks, for losses that are means over labels.

A model may ignore some labels, and so parts of a step have different numbers of them. A mean of
the parts' means would weigh a label more that has few others beside it. So each part divides its
summed loss by the mean number of labels of all parts: the parts' mean is then that over all labels.

The numbers are known on the host, where batches come from, and are added up there: no step waits
for the device.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import torch

from accbench.data import nested
from accbench.distributed.process_group import all_gather_values
from accbench.engines import Batch, Engine


def may_differ(spec: Any, source: Any) -> bool:
    """Return whether parts of a step may have different numbers of labels; alike on all ranks.

    Args:
        spec: the model's; one that counts no labels has a mean of its own.
        source: the data source.
    """
    ignores = getattr(spec, "ignores_labels", False) or getattr(source, "ignores_labels", True)
    return bool(getattr(spec, "counts_labels", False) and ignores)


def of_parts(spec: Any, batches: Sequence[Batch]) -> list[Batch]:
    """Return the batches of all ranks in a step, each with the labels to divide by."""
    total = sum(spec.count_labels(batch) for batch in batches)
    return [
        spec.with_label_counts(batch, _shares(batch, total / len(batches))) for batch in batches
    ]


def _shares(batch: Batch, num_labels: float) -> torch.Tensor:
    """Return a rank's mean number of labels, shared out evenly over its samples, (N,) float32."""
    num_samples = nested.num_rows(batch)
    return torch.full((num_samples,), num_labels / num_samples)


class _CountedBatch(NamedTuple):
    batch: Batch
    num_labels: int
    """A number on the host, whatever device the batch is on."""


class _CountingLoader:
    """A loader whose batches are counted in the thread that fetches them."""

    def __init__(self, loader: Any, spec: Any) -> None:
        self.loader, self.spec = loader, spec
        self.resident: bool = loader.resident

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[_CountedBatch]:
        for batch in self.loader:
            yield _CountedBatch(batch, self.spec.count_labels(batch))

    @property
    def num_done(self) -> int:
        num_done: int = self.loader.num_done
        return num_done


class LabelCounts:
    """Gives a training loader's batches the labels to divide by, where parts may have other ones.

    Args:
        engine: the engine that trains.
        spec: the model's spec.
        source: the data source; without `ignores_labels` it is taken to have ignored labels.
    """

    def __init__(self, engine: Engine, spec: Any, source: Any) -> None:
        self.engine, self.spec = engine, spec
        self.num_ranks = engine.mesh.num_token_ranks
        num_parts = self.num_ranks * engine.task.accumulate
        self.is_needed = num_parts > 1 and may_differ(spec, source)
        self._resident: dict[int, Batch] = {}

    def device_batches(self, loader: Any) -> Generator[Batch, None, None]:
        """Yield what `Engine.device_batches` yields of a training loader; all ranks call it."""
        if not self.is_needed:
            yield from self.engine.device_batches(loader)
            return
        counting = _CountingLoader(loader, self.spec)
        with closing(self.engine.device_batches(counting)) as batches:
            for counted in batches:
                yield self._known(counted) if loader.resident else self._summed(counted)

    def _known(self, counted: _CountedBatch) -> Batch:
        """Return a batch that takes turns with others on the device, added up once."""
        if id(counted) not in self._resident:
            self._resident[id(counted)] = self._summed(counted)
        return self._resident[id(counted)]

    def _summed(self, counted: _CountedBatch) -> Batch:
        by_rank = all_gather_values([float(counted.num_labels)])
        # Ranks with the same tokens count the same, so that this is the mean of those with others.
        mean = sum(number for (number,) in by_rank) / len(by_rank)
        (labels_N,) = self.engine.to_device((_shares(counted.batch, mean),))
        return self.spec.with_label_counts(counted.batch, labels_N)
