"""Samplers: the samples that a rank reads, and their order; torch's own where it has them.

A sampler with `state_dict` can resume inside an epoch: also with another number of ranks or worker
processes, each sample still comes once per epoch. Loaders read ahead of training, so the caller of
`state_dict` says how many samples each rank has trained on.
"""

import copy
import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accbench.data.batch_samplers import (
    GroupedBatchSampler,
    IterationBasedBatchSampler,
    make_batch_data_sampler,
)
from accbench.distributed import slurm_variables

__all__ = [
    "BatchSampler",
    "DistributedSampler",
    "DistributedWeightedRandomSampler",
    "GroupedBatchSampler",
    "GroupedDistributedSampler",
    "IterationBasedBatchSampler",
    "RandomSampler",
    "SequentialSampler",
    "SubsetRandomSampler",
    "WeightedRandomSampler",
    "make_batch_data_sampler",
    "make_data_sampler",
]

_CHUNK = 65_536


def _num_ranks_and_rank() -> tuple[int, int]:
    """Return those of the process group or, before there is one, of the environment."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    variables = slurm_variables.with_torchruns(os.environ)
    if "WORLD_SIZE" not in variables or "RANK" not in variables:
        return 1, 0
    return int(variables["WORLD_SIZE"]), int(variables["RANK"])


class _ShardedSampler(Sampler[int]):
    """A rank's shard of an order that all ranks know, with the state for resuming.

    A state holds stages, one for each number of ranks that has read a part of the epoch: [ranks,
    samples that each of them has read].
    """

    def __init__(
        self, num_replicas: int | None, rank: int | None, seed: int, drop_last: bool,
        contiguous: bool,
    ) -> None:  # fmt: skip
        num_ranks, own_rank = _num_ranks_and_rank()
        self.num_replicas = num_replicas or num_ranks
        self.rank = own_rank if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"rank {self.rank} is not one of {self.num_replicas} ranks")
        self.seed, self.drop_last, self.contiguous = seed, drop_last, contiguous
        self.epoch = 0
        self._earlier: list[list[int]] = []  # stages with other numbers of ranks
        self._start = 0  # samples of the current stage that this rank has read
        self._num_yielded = 0

    def _order(self) -> torch.Tensor:
        """Return all samples of this epoch in order, (n,) int64."""
        raise NotImplementedError

    def _num_total(self) -> int:
        raise NotImplementedError

    def _identity(self) -> dict[str, Any]:
        """Return the values that must be equal for a state to fit."""
        return {"num_total": self._num_total(), "seed": self.seed, "contiguous": self.contiguous}

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which changes the order; drop a state loaded for another epoch."""
        if epoch != self.epoch:
            self.epoch, self._earlier, self._start = epoch, [], 0
        self._num_yielded = self._start

    def state_dict(self, num_consumed: int | None = None) -> dict[str, Any]:
        """Return the position in this epoch; it is the same on every rank.

        Args:
            num_consumed: samples of this rank in this epoch, since the last `load_state_dict`, that
                need not come again. None for all that the sampler has yielded, which includes those
                that a loader's worker processes have read ahead.
        """
        done = self._num_yielded if num_consumed is None else self._start + num_consumed
        stages = [*self._earlier, [self.num_replicas, done]]
        return {"epoch": self.epoch, "stages": stages, **self._identity()}

    @property
    def next_pass(self) -> dict[str, Any]:
        """What the order of the next pass depends on: its start."""
        return self.state_dict(0)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state, also with another number of ranks.

        Raises:
            ValueError: the state is of other data or of another order.
        """
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise ValueError(
                    f"the sampler's state has {name} {state.get(name)}, but here it is {value}"
                )
        _check_position(state)
        self.epoch = state["epoch"]
        stages = copy.deepcopy(state["stages"])
        self._earlier, self._start = stages, 0
        if stages and stages[-1][0] == self.num_replicas:
            self._start = self._earlier.pop()[1]
        self._num_yielded = self._start

    def __len__(self) -> int:
        remaining = self._num_total()
        for ranks, done in self._earlier:
            remaining -= self._num_read(remaining, ranks, done)
        return max(0, self._num_samples(remaining, self.num_replicas) - self._start)

    def _unread_samples(self, order: torch.Tensor) -> torch.Tensor:
        """Return the samples that earlier stages have not read, (n,) int64."""
        left = order
        for ranks, done in self._earlier:
            left = left[self._unread(len(left), ranks, done)]
        return left

    def __iter__(self) -> Iterator[int]:
        order = self._order()
        shard = self._shard(self._unread_samples(order), order)
        self._num_yielded = self._start
        for begin in range(self._start, len(shard), _CHUNK):
            # In chunks: a list of ten million integers takes 400 MB.
            for index in shard[begin : min(begin + _CHUNK, len(shard))].tolist():
                self._num_yielded += 1
                yield index

    def _num_samples(self, total: int, ranks: int) -> int:
        return total // ranks if self.drop_last else -(-total // ranks)

    def _shard(self, left: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        num_samples = self._num_samples(len(left), self.num_replicas)
        missing = num_samples * self.num_replicas - len(left)
        if missing > 0:
            # As torch pads: from the start of the epoch's order, repeated if there are fewer
            # samples than ranks.
            left = torch.cat([left, order.repeat(-(-missing // len(order)))[:missing]])
        if self.contiguous:
            return left[self.rank * num_samples : (self.rank + 1) * num_samples]
        return left[: num_samples * self.num_replicas][self.rank :: self.num_replicas]

    def _unread(self, total: int, ranks: int, done: int) -> torch.Tensor:
        """Return what `ranks` ranks that read `done` samples each have left, (total,) bool."""
        positions = torch.arange(total)
        if not self.contiguous:
            return positions >= ranks * done
        num_samples = max(1, self._num_samples(total, ranks))
        dropped = positions >= num_samples * ranks
        return (positions % num_samples >= done) | dropped

    def _num_read(self, total: int, ranks: int, done: int) -> int:
        if not self.contiguous:
            return min(total, ranks * done)
        return total - int(self._unread(total, ranks, done).sum())


def _check_position(state: dict[str, Any]) -> None:
    epoch, stages = state.get("epoch"), state.get("stages")
    are_stages = isinstance(stages, (list, tuple)) and all(
        isinstance(stage, (list, tuple))
        and len(stage) == 2
        and all(isinstance(number, int) and number >= 0 for number in stage)
        and stage[0] > 0
        for stage in stages
    )
    for name, value, fits in (
        ("epoch", epoch, isinstance(epoch, int)), ("stages", stages, are_stages)
    ):  # fmt: skip
        if not fits:
            raise ValueError(
                f"the sampler's state has {name} {value}; it must be what `state_dict` gave"
            )


class DistributedSampler(_ShardedSampler):
    """A sampler equal to torch's `DistributedSampler` that can also resume inside an epoch.

    Args:
        dataset: the data set, or anything with a length.
        num_replicas: number of ranks; None for that of the process group or, before there is one,
            of torchrun's or srun's environment.
        rank: this rank.
        shuffle: whether each epoch has a new order, from `seed` and the epoch.
        seed: seed of the order.
        drop_last: drop the samples that do not fill all ranks, instead of padding with the first
            samples of the epoch.
        contiguous: each rank reads one contiguous part of the order, as in maskrcnn-benchmark,
            instead of every `num_replicas`th sample.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        contiguous: bool = False,
    ) -> None:
        super().__init__(num_replicas, rank, seed, drop_last, contiguous)
        self.dataset, self.shuffle = dataset, shuffle

    def _num_total(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "shuffle": self.shuffle}

    def _order(self) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self._num_total())
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self._num_total(), generator=generator)


class GroupedDistributedSampler(DistributedSampler):
    """A distributed sampler whose batches are of one group, the same on all ranks in a step.

    Ranks with the same shapes do not wait for each other, and all have as many batches.
    maskrcnn-benchmark groups each rank's samples, which ensures neither. Samples that do not fill a
    batch of all ranks are left out of the epoch, different ones in each epoch.

    Args:
        dataset: the data set, or anything with a length.
        group_ids: the group of every sample of the dataset.
        batch_size: samples of a rank's batch. A state fits only the same batch size.
        num_replicas: number of ranks; None for that of the process group or, before there is one,
            of torchrun's or srun's environment.
        rank: this rank.
        shuffle: whether each epoch has a new order.
        seed: seed of the order.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        group_ids: Sequence[int],
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last=True)
        self.group_ids, self.batch_size = [int(group) for group in group_ids], batch_size
        self._group_sizes = torch.tensor(self.group_ids).unique(return_counts=True)[1].tolist()
        numbers = torch.tensor(self.group_ids).numpy().tobytes()
        self._groups_id = hashlib.sha256(numbers).hexdigest()[:16]

    def _identity(self) -> dict[str, Any]:
        grouped = {"batch_size": self.batch_size, "groups": self._groups_id}
        return {**super()._identity(), **grouped}

    def _unread_samples(self, order: torch.Tensor) -> torch.Tensor:
        left = order
        for ranks, done in self._earlier:
            left = self._in_batches(left, ranks)[ranks * done :]
        return self._in_batches(left, self.num_replicas)

    def _in_batches(self, left: torch.Tensor, ranks: int) -> torch.Tensor:
        """Return the samples in batches of all ranks, in the order of their first samples."""
        batches = GroupedBatchSampler(
            left.tolist(),  # type: ignore[arg-type]
            self.group_ids, self.batch_size * ranks, drop_uneven=True,
        )  # fmt: skip
        return torch.tensor([index for batch in batches for index in batch], dtype=torch.int64)

    def __len__(self) -> int:
        if self._earlier:
            total = len(self._unread_samples(self._order())) // self.num_replicas
        else:  # it does not depend on the order
            global_batch = self.batch_size * self.num_replicas
            total = sum(size // global_batch for size in self._group_sizes) * self.batch_size
        return max(0, total - self._start)


class DistributedWeightedRandomSampler(_ShardedSampler):
    """A distributed `WeightedRandomSampler`: draws by weight that are sharded over ranks.

    Args:
        weights: weight of each sample, not negative; they need not sum to one.
        num_samples: samples drawn per epoch, over all ranks.
        replacement: whether a sample may be drawn twice.
        num_replicas: number of ranks; None for that of the process group or, before there is one,
            of torchrun's or srun's environment.
        rank: this rank.
        seed: seed of the draws.
        drop_last: drop the samples that do not fill all ranks.
        contiguous: each rank reads one contiguous part of the draws.

    Raises:
        ValueError: a weight is negative or not finite, all are 0, or there are
            fewer positive weights than samples to draw without replacement.
    """

    def __init__(
        self,
        weights: Sequence[float] | torch.Tensor,
        num_samples: int,
        replacement: bool = True,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        contiguous: bool = False,
    ) -> None:
        super().__init__(num_replicas, rank, seed, drop_last, contiguous)
        self.weights = torch.as_tensor(weights, dtype=torch.float64)
        if not bool(torch.isfinite(self.weights).all()) or bool((self.weights < 0).any()):
            raise ValueError("weights must be finite and not negative")
        num_positive = int((self.weights > 0).sum())
        if num_samples < 1 or num_positive < (1 if replacement else num_samples):
            raise ValueError(f"{num_samples} samples cannot be drawn by {num_positive} weights > 0")
        self.num_samples, self.replacement = num_samples, replacement
        self._weights_id = hashlib.sha256(self.weights.numpy().tobytes()).hexdigest()[:16]

    def _num_total(self) -> int:
        return self.num_samples

    def _identity(self) -> dict[str, Any]:
        drawn_by = {"replacement": self.replacement, "weights": self._weights_id}
        return {**super()._identity(), **drawn_by}

    def _order(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        if self.replacement:  # not torch.multinomial, which takes at most 2^24 weights
            ends = self.weights.cumsum(0)
            drawn = torch.rand(self.num_samples, generator=generator, dtype=torch.float64)
            last = int(self.weights.nonzero()[-1])
            return torch.searchsorted(ends, drawn * ends[-1], right=True).clamp_(max=last)
        # Efraimidis and Spirakis, 2006: the largest log(u) / w are a draw without replacement.
        uniform = torch.rand(len(self.weights), generator=generator, dtype=torch.float64)
        return (uniform.log() / self.weights).topk(self.num_samples).indices


def make_data_sampler(
    dataset: Any,
    shuffle: bool,
    distributed: bool,
    seed: int = 0,
    num_replicas: int | None = None,
    rank: int | None = None,
) -> Sampler[int]:
    """Build the sampler for a dataset: distributed, random (seeded), or sequential.

    Args:
        dataset: the data set.
        shuffle: whether the order is random.
        distributed: whether ranks share the samples.
        seed: seed of the order.
        num_replicas: number of ranks if distributed; None for that of the process group.
        rank: this rank; None for that in the process group.

    Raises:
        ValueError: distributed, with None for a value and without a process group.
    """
    if distributed:
        in_group = dist.is_available() and dist.is_initialized()
        if None in (num_replicas, rank) and not in_group:
            raise ValueError(
                "a distributed sampler needs to know its rank: call "
                "torch.distributed.init_process_group first, or give num_replicas and rank"
            )
        return DistributedSampler(dataset, num_replicas, rank, shuffle, seed)
    if shuffle:
        return RandomSampler(dataset, generator=torch.Generator().manual_seed(seed))
    return SequentialSampler(dataset)
