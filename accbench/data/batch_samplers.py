"""Batches by group, and batches by the iteration instead of the epoch, as maskrcnn-benchmark
has them. To be imported from `accbench.data.samplers`."""

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

    As maskrcnn-benchmark's; a group without a sample is no failure. On several
    ranks the numbers of batches may differ: put an `IterationBasedBatchSampler` around.
    `len` counts the batches of the next pass and changes nothing about their order.

    Args:
        group_ids: the group of every sample of the dataset.
        drop_uneven: leave out batches that are not full; `drop_last` is the same.
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
        # Of the last `len`: (what the order depended on, the number of batches). Counting takes
        # a whole pass, and loops ask for the length of their loader in every step.
        self._counted: tuple[Any, int] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Pass it on."""
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
            with _random_numbers_kept():
                self._counted = position, len(self._batches(_copy(self.sampler)))
        return self._counted[1]

    def __iter__(self) -> Iterator[list[int]]:
        self._counted = None
        return iter(self._batches(self.sampler))


def _position(sampler: Any) -> tuple[Any, bytes]:
    """What the order of the next pass depends on, as far as the sampler tells."""
    generator = getattr(sampler, "generator", None)
    drawn = b"" if generator is None else generator.get_state().numpy().tobytes()
    return getattr(sampler, "next_pass", getattr(sampler, "epoch", None)), drawn


def _copy(sampler: Any) -> Any:
    """A sampler whose passes leave this one as it is; they share the dataset."""
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
def _random_numbers_kept() -> Iterator[None]:
    """The generators that a sampler without one of its own may draw from go on as before."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


class IterationBasedBatchSampler(BatchSampler):
    """Batches of another batch sampler, over and over, `num_iterations` in all.

    `len` is `num_iterations`, as in maskrcnn-benchmark, wherever it begins; `num_left` counts
    from there. Has the attributes `sampler`, `batch_size` and `drop_last` that the other has.
    The passes count as epochs. With `start_iter` the batches are those that an
    uninterrupted run would have had from there; for that the order must depend on
    the epoch or on a seeded generator alone.

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
        self._before_all = self._generator.get_state() if self._generator is not None else None
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
        """Where it is, after `num_consumed` batches of this sampler."""
        return {"start_iter": self.start_iter + num_consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, also where batches were drawn since.

        Raises:
            ValueError: the state is none of this class.
        """
        start = state.get("start_iter")
        if not isinstance(start, int):
            raise ValueError(
                f"the sampler's state has start_iter {start}; it must be what `state_dict` gave"
            )
        self._start_at(start)
        if self._generator is not None:
            self._generator.set_state(self._before_all)


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
    """Batches for a dataset, as maskrcnn-benchmark makes them.

    Args:
        dataset: with `get_img_info(index)`, which gives "height" and "width", where
            images are grouped.
        aspect_grouping: group images by height / width between these bounds; True
            is [1], upright and not.
        num_iters: batches in all, over as many passes as that takes; one pass if None.
        start_iter: batches to leave out, of `num_iters`.
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
    """The group of each image: how many of the bounds its height / width has reached."""
    bounds = [1.0] if isinstance(aspect_grouping, bool) else sorted(aspect_grouping)
    return [bisect.bisect_right(bounds, ratio) for ratio in _aspect_ratios(dataset)]


def _aspect_ratios(dataset: _WithSizes) -> Iterator[float]:
    for index in range(len(dataset)):
        info = dataset.get_img_info(index)
        yield info["height"] / info["width"]
