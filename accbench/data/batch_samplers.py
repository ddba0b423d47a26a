"""Batch samplers by group and by iteration, as maskrcnn-benchmark has them.

Import them from `accbench.data.samplers`.
"""

import bisect
import contextlib
import copy
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import BatchSampler, Sampler


class GroupedBatchSampler(BatchSampler):
    """Batches of samples of one group each, in the order of their first samples.

    It works as maskrcnn-benchmark's, except that a group may have no sample. On several ranks the
    numbers of batches may differ: wrap it in an `IterationBasedBatchSampler`.
    `len` counts the batches of the next pass and changes nothing about their order.

    Args:
        sampler: gives indices of samples.
        group_ids: the group of every sample of the dataset.
        batch_size: samples of a full batch.
        drop_uneven: skip batches that are not full; `drop_last` is the same.
    """

    def __init__(
        self,
        sampler: Sampler[int],
        group_ids: Sequence[int],
        batch_size: int,
        drop_uneven: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        super().__init__(sampler, int(batch_size), bool(drop_uneven))
        self.drop_uneven = drop_uneven
        self.group_ids = torch.as_tensor(group_ids).tolist()
        # Result of the last `len`: (what the order depended on, the number of batches). Counting
        # takes a whole pass, and loops ask for the length of their loader in every step.
        self._counted: tuple[Any, int] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the sampler."""
        self._counted = None
        _set_epoch(self.sampler, epoch)

    def _batches(self, sampler: Any) -> list[list[int]]:
        open_: dict[int, list[int]] = {}
        batches: list[list[int]] = []
        for index in sampler:
            group = self.group_ids[index]
            if group not in open_:
                open_[group] = []
                batches.append(open_[group])
            open_[group].append(index)
            if len(open_[group]) == self.batch_size:
                del open_[group]
        if self.drop_uneven:
            return [batch for batch in batches if len(batch) == self.batch_size]
        return batches

    def __len__(self) -> int:
        position = _position(self.sampler)
        if self._counted is None or self._counted[0] != position:
            with _preserve_random_state():
                self._counted = position, len(self._batches(_copy(self.sampler)))
        return self._counted[1]

    def __iter__(self) -> Iterator[list[int]]:
        self._counted = None
        return iter(self._batches(self.sampler))


def _position(sampler: Any) -> tuple[Any, bytes]:
    """Return what the order of the next pass depends on, as far as the sampler shows it."""
    generator = getattr(sampler, "generator", None)
    drawn = b"" if generator is None else generator.get_state().numpy().tobytes()
    return getattr(sampler, "next_pass", getattr(sampler, "epoch", None)), drawn


def _copy(sampler: Any) -> Any:
    """Copy a sampler, so that passes over the copy do not change it; they share the dataset."""
    copied = copy.copy(sampler)
    for name, value in vars(sampler).items() if hasattr(sampler, "__dict__") else ():
        if isinstance(value, torch.Generator):
            setattr(copied, name, value.clone_state())
        elif isinstance(value, (random.Random, np.random.Generator, np.random.RandomState)):
            setattr(copied, name, copy.deepcopy(value))
        elif isinstance(value, Sampler):
            setattr(copied, name, _copy(value))
    return copied


@contextlib.contextmanager
def _preserve_random_state() -> Iterator[None]:
    """Restore the global random generators after the block."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


class IterationBasedBatchSampler(BatchSampler):
    """Batches of another batch sampler, repeated for `num_iterations` in all.

    `len` is `num_iterations`, as in maskrcnn-benchmark, wherever it begins; `num_left` counts from
    `start_iter`. It has the attributes `sampler`, `batch_size` and `drop_last` that the other has.
    Passes count as epochs. With `start_iter` the batches are those that an uninterrupted run would
    have had from there; for that the order must depend only on the epoch or on a seeded generator.

    Raises:
        ValueError: `start_iter`, here or in a state, with a sampler that draws from torch's
            global generator; when iterating, a sampler without a batch.
    """

    def __init__(
        self, batch_sampler: Sampler[list[int]], num_iterations: int, start_iter: int = 0
    ) -> None:
        self.batch_sampler, self.num_iterations = batch_sampler, num_iterations
        for name in ("sampler", "batch_size", "drop_last"):
            if hasattr(batch_sampler, name):
                setattr(self, name, getattr(batch_sampler, name))
        self._generator = getattr(getattr(batch_sampler, "sampler", None), "generator", None)
        self._first_state = self._generator.get_state() if self._generator is not None else None
        self._start_at(start_iter)

    def _start_at(self, start_iter: int) -> None:
        inner = getattr(self.batch_sampler, "sampler", None)
        if start_iter and getattr(inner, "generator", self) is None:
            raise ValueError(
                f"start_iter {start_iter} needs {type(inner).__name__} to have a seeded generator"
            )
        self.start_iter = start_iter

    def __len__(self) -> int:
        return self.num_iterations

    @property
    def num_left(self) -> int:
        """Batches of the next pass: those from `start_iter` on."""
        return max(0, self.num_iterations - self.start_iter)

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(self._endless(), self.start_iter, self.num_iterations)

    def _endless(self) -> Iterator[list[int]]:
        for epoch in itertools.count():
            _set_epoch(self.batch_sampler, epoch)
            empty = True
            for batch in self.batch_sampler:
                empty = False
                yield batch
            if empty:
                raise ValueError("the sampler is empty, so it has no batch to repeat")

    def state_dict(self, num_consumed: int) -> dict[str, Any]:
        """Return the position after `num_consumed` batches of this sampler."""
        return {"start_iter": self.start_iter + num_consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state, also if batches were drawn since.

        Raises:
            ValueError: the state is not one of this class.
        """
        start = state.get("start_iter")
        if not isinstance(start, int):
            raise ValueError(
                f"the sampler's state has start_iter {start}; it must be what `state_dict` gave"
            )
        self._start_at(start)
        if self._generator is not None:
            self._generator.set_state(self._first_state)


def _set_epoch(sampler: Any, epoch: int) -> None:
    for candidate in (sampler, getattr(sampler, "sampler", None)):
        if candidate is not None and hasattr(candidate, "set_epoch"):
            candidate.set_epoch(epoch)
            return


class _WithSizes(Protocol):
    def __len__(self) -> int: ...

    def get_img_info(self, index: int) -> dict[str, int]: ...


def make_batch_data_sampler(
    dataset: _WithSizes,
    sampler: Sampler[int],
    aspect_grouping: bool | Sequence[float],
    images_per_batch: int,
    num_iters: int | None = None,
    start_iter: int = 0,
) -> Sampler[list[int]]:
    """Build a batch sampler for a dataset, as maskrcnn-benchmark does.

    Args:
        dataset: if images are grouped, its `get_img_info(index)` gives "height" and "width".
        sampler: gives indices of samples.
        aspect_grouping: group images by height / width between these bounds; True
            is [1], upright and not.
        images_per_batch: samples of a batch.
        num_iters: batches in all, over as many passes as that takes; one pass if None.
        start_iter: batches of `num_iters` to skip.
    """
    batches: Sampler[list[int]]
    if aspect_grouping:
        group_ids = groups_of_aspect_ratio(dataset, aspect_grouping)
        batches = GroupedBatchSampler(sampler, group_ids, images_per_batch)
    else:
        batches = BatchSampler(sampler, images_per_batch, drop_last=False)
    if num_iters is None:
        return batches
    return IterationBasedBatchSampler(batches, num_iters, start_iter)


def groups_of_aspect_ratio(
    dataset: _WithSizes, aspect_grouping: bool | Sequence[float]
) -> list[int]:
    """Return each image's group: the number of bounds that its height / width has reached."""
    bounds = [1.0] if isinstance(aspect_grouping, bool) else sorted(aspect_grouping)
    return [bisect.bisect_right(bounds, ratio) for ratio in _aspect_ratios(dataset)]


def _aspect_ratios(dataset: _WithSizes) -> Iterator[float]:
    for index in range(len(dataset)):
        info = dataset.get_img_info(index)
        yield info["height"] / info["width"]
