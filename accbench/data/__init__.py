"""The data contract: where batches come from.

`accbench/data/<name>.py` defines `class Source(data.Source)`. A batch is on the host, and of
tensors in any nesting; of a source that gives images it is (images (N, 3, H, W) uint8,
labels (N,) int64).
"""

import abc
import dataclasses
import signal
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, default_collate

from accbench.config import TaskConfig
from accbench.data import nested, shared_memory
from accbench.data.loader import naming_dead_workers
from accbench.data.mixing import Mixing
from accbench.data.samplers import (
    DistributedSampler,
    GroupedBatchSampler,
    GroupedDistributedSampler,
)
from accbench.distributed.process_group import Topology
from accbench.errors import BadSampleError, RequestError, UnreadableSampleError

Batch = Any
"""Tensors in nests of any kind; see `accbench.data.nest_kinds`."""
# (image (H, W, 3) uint8, label, what was wrong with the sample it stands for)
Sample = tuple[torch.Tensor, Any, str | None]
PADDING_LABEL = -1
# More than this is not a few damaged samples but a damaged data set.
MAX_UNREADABLE_IN_A_ROW = 100


class Source(abc.ABC):
    """A training set and perhaps a validation set. Made in the worker."""

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Knobs of this source alone; each becomes the flag `--<source>.<knob>`.

        Class variables `minimum` and `maximum`, knob -> value, say what is refused.
        """

    num_classes: int
    """Of the labels, or the size of the vocabulary."""
    gives: ClassVar[str | None] = "images"
    """The kind of batches, to be the same as the model's `takes`; None: whatever that takes."""

    @classmethod
    @abc.abstractmethod
    def check(cls, location: str | None) -> None:
        """A quick look before workers start.

        Raises:
            RequestError: there is no data; the message says what to do.
        """

    @abc.abstractmethod
    def train_loader(self) -> Any:
        """Full batches of this rank's shard; see `Loader` for what a loader has.

        Its `check` is called with each batch, and `problems` with a line on what was left out.
        """

    def eval_loader(self) -> Any | None:
        """The rank's part of the validation set, every sample once; None if there is none."""
        return None


class _InEpoch(Dataset[Any]):
    """Samples by `epoch * size + index`, augmented by that and the seed alone.

    So a sample is the same whichever process reads it, and whatever was read before: what a
    resumed run, or one with another number of ranks or loaders, has to see.
    """

    def __init__(self, dataset: Dataset[Any], chance: Any) -> None:
        self.dataset, self.chance = dataset, chance

    def __getitem__(self, key: int) -> Any:
        if self.chance is not None:
            self.chance.restart(key)
        return self.dataset[key % len(self.dataset)]  # type: ignore[arg-type]

    def __getitems__(self, keys: list[int]) -> "_KeyedSamples":
        return _KeyedSamples(keys[0], [self[key] for key in keys])


@dataclasses.dataclass(frozen=True)
class _KeyedSamples:
    """A batch's samples, with what tells it from all others."""

    key: int
    samples: list[Any]


class _Keys(Sampler[int]):
    """What `_InEpoch` takes, of the indices that a sampler gives."""

    def __init__(self, sampler: DistributedSampler, size: int) -> None:
        self.sampler, self.size = sampler, size

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        begin = self.sampler.epoch * self.size
        return (begin + index for index in self.sampler)


def _ignore_ctrl_c(_worker: int) -> None:
    """Leave it to the process that trains, which finishes its step and still needs batches."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def seed_of_rank(task: TaskConfig, topology: Topology) -> int:
    """A seed that no other rank has."""
    return task.seed * 100_003 + topology.rank


class ReadableSamples(Dataset[Sample]):
    """A dataset that goes on past samples which cannot be read.

    In place of a bad sample stands the next good one, with a word on the bad.
    """

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def read(self, index: int) -> tuple[torch.Tensor, Any]:
        """(image (H, W, 3) uint8, label), the label being of whatever kind `collate` takes.

        Raises:
            UnreadableSampleError: named with its file or key, and where in it.
        """

    def instead(self, index: int, offset: int) -> int:
        """The sample that stands for one where the `offset` before could not be read."""
        return (index + offset) % len(self)

    def __getitem__(self, index: int) -> Sample:
        problem = None
        tries = min(len(self), MAX_UNREADABLE_IN_A_ROW)
        for offset in range(tries):
            try:
                image_HWC, label = self.read(self.instead(index, offset))
            except UnreadableSampleError as error:
                problem = problem or str(error)
            else:
                return image_HWC, label, problem
        raise BadSampleError(f"{tries} samples in a row could not be read; first: {problem}")


class Loader:
    """Batches of a rank's shard from worker processes, on the host.

    Samples that could not be read arrive replaced and described, see `Sample`;
    here they are counted, and beyond `--max_bad_samples` they are an error.

    Args:
        chance: the `decode.Chance` that the dataset augments by, if it does.
        mixing: what mixes training batches, if anything does.
        collate: called with the samples that a short batch is padded to, or without; what it
            gives makes (a batch, its problems) of a list of samples, as `Collate` does.
        group_ids: of every sample of the dataset; a batch is then of one group, and in training
            that of all ranks.
    """

    resident = False
    """True where the batches are few and fixed and may stay on the device."""

    def __init__(
        self, dataset: Dataset[Any], task: TaskConfig, topology: Topology, train: bool,
        chance: Any = None, mixing: Mixing | None = None, collate: Callable[..., Any] | None = None,
        group_ids: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        assert task.batch_size is not None
        assert task.workers is not None
        size = len(dataset)  # type: ignore[arg-type]
        sampler: DistributedSampler | None = None
        keys: _Keys | None = None
        batches: GroupedBatchSampler | None = None
        if train:
            sampler = _sampler(dataset, task, topology, group_ids)
            if len(sampler) < task.batch_size:
                of_one = " of one group" if group_ids is not None else ""
                raise RequestError(
                    f"{size} samples make {len(sampler)} a worker, fewer than one batch{of_one}; "
                    f"lower --batch_size {task.batch_size} or --nproc_per_node"
                )
            dataset, keys = _InEpoch(dataset, chance), _Keys(sampler, size)
        else:  # strided like the sampler's shards, but nothing twice
            own = range(topology.rank, size, topology.world_size)
            dataset = Subset(dataset, own)
            if group_ids is not None:
                groups = [group_ids[index] for index in own]
                in_order: Any = range(len(own))
                batches = GroupedBatchSampler(in_order, groups, task.batch_size)
        self.num_bad_samples = 0
        self.problems: Callable[[str], None] = lambda problem: None
        self.check: Callable[[Batch], None] = lambda batch: None
        self._max_bad_samples = task.max_bad_samples
        self._sampler, self._batch_size = sampler, task.batch_size
        self._num_ranks, self._has_room = topology.local_world_size, False
        collate = collate or Collate
        collated: Any = _CollateInEpoch(collate(), mixing) if train else collate(task.batch_size)
        self._dataset, self._keys, self._collate = dataset, keys, collated
        self._loader = DataLoader(
            dataset,
            batch_size=task.batch_size if batches is None else 1,  # which leaves it to them
            sampler=keys,
            batch_sampler=batches,
            drop_last=train,
            num_workers=task.workers,
            collate_fn=collated,
            pin_memory=task.device == "cuda",
            # Not fork: the parent has a device and threads by now. Not forkserver: its
            # children outlive a parent that is killed, for they watch the server alone.
            multiprocessing_context="spawn" if task.workers else None,
            persistent_workers=train and task.workers > 0,
            worker_init_fn=_ignore_ctrl_c,
            generator=torch.Generator().manual_seed(task.seed + topology.rank),
        )

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle anew for this epoch; the same on all ranks."""
        if self._sampler is not None:
            self._sampler.set_epoch(epoch)

    def preview(self, num_images: int) -> torch.Tensor | None:
        """The first images of the epoch, as training sees them: (n, 3, H, W) uint8."""
        assert self._keys is not None, "only a training loader has keys"
        keys = [*islice(self._keys, min(num_images, self._batch_size))]
        batch, _ = self._collate(self._dataset.__getitems__(keys))
        return images_of(batch, num_images)

    def state_dict(self, num_batches: int) -> dict[str, Any]:
        """Where this epoch is after this rank trained on `num_batches` of it here.

        Counted by whoever trains: the loader is ahead. The same on all ranks.
        """
        assert self._sampler is not None, "only a training loader has a state"
        return self._sampler.state_dict(num_batches * self._batch_size)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, also with another number of ranks, workers or samples a batch.

        Raises:
            ValueError: the state is of other data, another seed or another order.
        """
        assert self._sampler is not None, "only a training loader has a state"
        self._sampler.load_state_dict(state)

    def __iter__(self) -> Iterator[Batch]:
        if self._keys is not None:
            self._check_shared_memory(self._keys)
        with shared_memory.explained():
            batches = iter(self._loader)
        for batch, problems in naming_dead_workers(batches):
            for problem in problems:
                self._count(problem)
            self.check(batch)
            yield batch

    def _check_shared_memory(self, keys: _Keys) -> None:
        """Look whether the batches of all loading processes fit, by the size of one sample.

        Raises:
            RequestError: they do not, and some day a process would be killed by a bus error.
        """
        if self._loader.num_workers == 0 or self._has_room or shared_memory.is_ample():
            return
        self._has_room = True  # it is asked once: later the batches themselves are there
        try:
            batch, _ = self._collate(self._dataset.__getitems__([*islice(keys, 1)]))
        except Exception:  # of a sample, which the loading process is to tell of
            return
        num_bytes = shared_memory.bytes_of(batch) * self._batch_size
        problem = shared_memory.problem(num_bytes, self._loader.num_workers, self._num_ranks)
        if problem is not None:
            raise RequestError(problem)

    def _count(self, problem: str) -> None:
        self.num_bad_samples += 1
        if self.num_bad_samples > self._max_bad_samples:
            raise BadSampleError(
                f"{problem}; {self.num_bad_samples} bad so far, --max_bad_samples "
                f"{self._max_bad_samples} a worker: mend the file or raise the limit"
            )
        self.problems(problem)


def _sampler(
    dataset: Dataset[Any], task: TaskConfig, topology: Topology, group_ids: Sequence[int] | None
) -> DistributedSampler:
    assert task.batch_size is not None
    if group_ids is None:
        return DistributedSampler(dataset, topology.world_size, topology.rank, seed=task.seed)
    return GroupedDistributedSampler(
        dataset, group_ids, task.batch_size, topology.world_size, topology.rank, seed=task.seed
    )


def images_of(batch: Batch, num_images: int) -> torch.Tensor | None:
    """The batch's first images (n, 3, H, W) uint8, if it has such."""
    for tensor in nested.tensors_of(batch):
        if tensor.dtype is torch.uint8 and tensor.dim() == 4:
            return tensor[:num_images]
    return None


@dataclasses.dataclass(frozen=True)
class Collate:
    """Samples to ((images (N, 3, H, W) uint8, labels (N,)), problems).

    The images are NHWC in memory, as decoders write them: torch calls that
    channels_last, and nothing is copied twice. With `pad_to`, a short batch is
    filled up with black images of label `PADDING_LABEL`, for a compiler wants
    one shape.
    """

    pad_to: int = 0

    def __call__(self, samples: list[Sample]) -> tuple[Batch, list[str]]:
        # torch's own, for in a worker process it stacks into memory that is shared already.
        images_NHWC = default_collate([image for image, _, _ in samples])
        labels_N = torch.tensor([label for _, label, _ in samples])
        missing = self.pad_to - len(samples)
        if missing > 0:
            images_NHWC = torch.cat(
                [images_NHWC, images_NHWC.new_zeros(missing, *images_NHWC.shape[1:])]
            )
            labels_N = torch.cat([labels_N, labels_N.new_full((missing,), PADDING_LABEL)])
        problems = [problem for _, _, problem in samples if problem is not None]
        return (images_NHWC.permute(0, 3, 1, 2), labels_N), problems


@dataclasses.dataclass(frozen=True)
class _CollateInEpoch:
    """Likewise, of samples that have a key, and mixed."""

    collate: Callable[[list[Any]], tuple[Batch, list[str]]]
    mixing: Mixing | None

    def __call__(self, batch: _KeyedSamples) -> tuple[Batch, list[str]]:
        whole, problems = self.collate(batch.samples)
        if self.mixing is None:
            return whole, problems
        images_NCHW, labels_N = whole
        images_NHWC = images_NCHW.permute(0, 2, 3, 1)
        mixed_NHWC, weights_NC = self.mixing(images_NHWC, labels_N, batch.key)
        return (mixed_NHWC.permute(0, 3, 1, 2), weights_NC), problems
