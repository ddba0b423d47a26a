"""The data contract: a source gives loaders, and a loader gives batches.

`accbench/data/sources/<name>.py` defines `class Source(data.Source)`. A batch is on the host, and
consists of tensors in any nesting; sources of images give (images (N, 3, H, W) uint8, labels (N,)
int64).
"""

import abc
import dataclasses
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, default_collate

from accbench import models
from accbench.config import TaskConfig, plugins
from accbench.data import nested, shared_memory
from accbench.data.loader import name_dead_workers
from accbench.data.mixing import Mixing
from accbench.data.samplers import (
    DistributedSampler,
    GroupedBatchSampler,
    GroupedDistributedSampler,
)
from accbench.distributed.process_group import Topology
from accbench.errors import BadSampleError, RequestError, UnreadableSampleError

Batch = Any
"""Tensors in containers of any kind; see `accbench.data.nest_kinds`."""
# (image (H, W, 3) uint8, label, why the sample that this replaces could not be read)
Sample = tuple[torch.Tensor, Any, str | None]
PADDING_LABEL = -1
# More unreadable samples in a row mean that the data set is damaged.
MAX_UNREADABLE_IN_A_ROW = 100


class Source(abc.ABC):
    """A training set and perhaps a validation set, built in the worker."""

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Knobs of this source alone; each becomes the flag `--<source>.<knob>`.

        Declare each with `accbench.config.flag`, which has its default, help and range.
        """

    num_classes: int
    """Number of classes of the labels, or the size of the vocabulary."""
    gives: ClassVar[str | None] = "images"
    """The kind of batches, which must equal the model's `takes`; None fits every model."""
    ignores_labels: ClassVar[bool] = True
    """Whether training batches may have labels that a loss ignores, and thus different numbers of
    others; counting these takes a small sum over the ranks in every step."""

    @classmethod
    @abc.abstractmethod
    def check(cls, location: str | None) -> None:
        """Check quickly that there is data, before workers start.

        Raises:
            RequestError: there is no data; the message says what to do.
        """

    @abc.abstractmethod
    def train_loader(self) -> Any:
        """Return a loader of full batches of this rank's shard; see `Loader` for its interface.

        It calls its `check` with each batch, and `problems` with a line on each skipped sample.
        """

    def eval_loader(self) -> Any | None:
        """Return a loader of the rank's part of the validation set; None if there is none.

        Over all ranks it gives every sample once.
        """
        return None


class _EpochDataset(Dataset[Any]):
    """A dataset indexed by `epoch * size + index`, augmented by that key and the seed alone.

    A sample is thus the same whichever process reads it, and whatever was read before, as a resumed
    run or one with another number of ranks or loaders needs.
    """

    def __init__(self, dataset: Dataset[Any], chance: Any) -> None:
        self.dataset, self.chance = dataset, chance

    def __getitem__(self, key: int) -> Any:
        if self.chance is not None:
            self.chance.restart(key)
        return self.dataset[key % len(self.dataset)]  # type: ignore[arg-type]

    def __getitems__(self, keys: list[int]) -> "_KeyedSamples":
        # Not the dataset's `__getitems__`: each sample is augmented by its own key.
        fetch_samples = getattr(self.dataset, "fetch_samples", None)
        if fetch_samples is not None:
            fetch_samples([key % len(self.dataset) for key in keys])  # type: ignore[arg-type]
        return _KeyedSamples(keys[0], [self[key] for key in keys])


@dataclasses.dataclass(frozen=True)
class _KeyedSamples:
    """A batch's samples, with a key that identifies the batch."""

    key: int
    samples: list[Any]


class _EpochKeys(Sampler[int]):
    """The keys of `_EpochDataset` for the indices that a sampler gives."""

    def __init__(self, sampler: DistributedSampler, size: int) -> None:
        self.sampler, self.size = sampler, size
        self.holds_back = False
        """Set while loading processes start, which then get no key yet."""

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        if self.holds_back:
            return iter(())
        begin = self.sampler.epoch * self.size
        return (begin + index for index in self.sampler)


def _begin_loading(training_pid: int, _worker: int) -> None:
    """Ignore Ctrl-C, which the training process handles, and end if that has been killed.

    torch's loading processes watch whatever process is their parent by now. One whose parent was
    killed while this one imported torch would wait forever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.getppid() != training_pid:
        os._exit(1)  # nobody is there to be told


def seed_of_rank(task: TaskConfig, topology: Topology) -> int:
    """Return a seed that no other rank has."""
    return task.seed * 100_003 + topology.rank


class ReadableSamples(Dataset[Sample]):
    """A dataset that replaces unreadable samples.

    The next readable sample replaces an unreadable one, with a message on the latter. A subclass
    may define `fetch_samples`, which training calls with a batch's indices before it reads them.
    """

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def read(self, index: int) -> tuple[torch.Tensor, Any]:
        """Read (image (H, W, 3) uint8, label); the label is of the kind that `collate` takes.

        Raises:
            UnreadableSampleError: the message names the file or key, and the position in it.
        """

    def replacement(self, index: int, offset: int) -> int:
        """Return the index of the replacement if the `offset` samples before could not be read."""
        return (index + offset) % len(self)

    def __getitem__(self, index: int) -> Sample:
        problem = None
        tries = min(len(self), MAX_UNREADABLE_IN_A_ROW)
        for offset in range(tries):
            try:
                image_HWC, label = self.read(self.replacement(index, offset))
            except UnreadableSampleError as error:
                problem = problem or str(error)
            else:
                return image_HWC, label, problem
        raise BadSampleError(f"{tries} samples in a row could not be read; first: {problem}")


class Loader:
    """Batches of a rank's shard on the host, from worker processes.

    Unreadable samples arrive replaced and described, see `Sample`; the loader counts them, and more
    than `--max_bad_samples` are an error.

    Args:
        dataset: gives samples by index.
        task: the task, for batch size, seed and loading processes.
        topology: this worker's rank.
        train: whether batches are shuffled, full and resumable.
        chance: the `decode.Chance` that the dataset augments by, if it does.
        mixing: mixes training batches; None for no mixing.
        collate: called with the number of samples that a short batch is padded to, or without it in
            training and where the model's scores would count padding; returns a function that
            builds (a batch, its problems) from a list of samples, as `Collate` does.
        group_ids: the group of every sample; all samples of a batch are then of one group, in
            training over all ranks.
    """

    resident = False
    """Whether the batches are few and fixed and may stay on the device."""

    def __init__(
        self, dataset: Dataset[Any], task: TaskConfig, topology: Topology, train: bool,
        chance: Any = None, mixing: Mixing | None = None, collate: Callable[..., Any] | None = None,
        group_ids: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        assert task.batch_size is not None
        assert task.workers is not None
        size = len(dataset)  # type: ignore[arg-type]
        sampler: DistributedSampler | None = None
        keys: _EpochKeys | None = None
        batches: GroupedBatchSampler | None = None
        if train:
            sampler = _sampler(dataset, task, topology, group_ids)
            if len(sampler) < task.batch_size:
                suffix = " of one group" if group_ids is not None else ""
                raise RequestError(
                    f"{size} samples make {len(sampler)} a worker, fewer than one batch{suffix}; "
                    f"lower --batch_size {task.batch_size} or --nproc_per_node"
                )
            dataset, keys = _EpochDataset(dataset, chance), _EpochKeys(sampler, size)
        else:  # strided like the sampler's shards, but nothing twice
            shard = range(topology.rank, size, topology.world_size)
            dataset = Subset(dataset, shard)
            if group_ids is not None:
                groups = [group_ids[index] for index in shard]
                in_order: Any = range(len(shard))
                batches = GroupedBatchSampler(in_order, groups, task.batch_size)
        self.num_bad_samples = 0
        self.problems: Callable[[str], None] = lambda problem: None
        self.check: Callable[[Batch], None] = lambda batch: None
        self.transform: Callable[[Batch], Batch] = lambda batch: batch
        self._max_bad_samples = task.max_bad_samples
        self._sampler, self._batch_size = sampler, task.batch_size
        self._num_ranks, self._has_room = topology.local_world_size, False
        collate = collate or Collate
        collated: Any = _EpochCollate(collate(), mixing) if train else _eval_collate(collate, task)
        self._dataset, self._keys, self._collate = dataset, keys, collated
        self._loader = DataLoader(
            dataset,
            batch_size=task.batch_size
            if batches is None
            else 1,  # which leaves the size to `batches`
            sampler=keys,
            batch_sampler=batches,
            drop_last=train,
            num_workers=task.workers,
            collate_fn=collated,
            pin_memory=task.device == "cuda" and plugins.load("engines", task.engine).pins_batches,
            # Not fork: the parent already has a device and threads. Not forkserver: its children
            # outlive a parent that is killed, because they watch only the server.
            multiprocessing_context="spawn" if task.workers else None,
            persistent_workers=train and task.workers > 0,
            worker_init_fn=partial(_begin_loading, os.getpid()),
            generator=torch.Generator().manual_seed(task.seed + topology.rank),
        )

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle for this epoch, in the same order on all ranks."""
        if self._sampler is not None:
            self._sampler.set_epoch(epoch)

    def preview(self, num_images: int) -> torch.Tensor | None:
        """Return the epoch's first images as training gets them: (n, 3, H, W) uint8."""
        assert self._keys is not None, "only a training loader has keys"
        keys = [*islice(self._keys, min(num_images, self._batch_size))]
        batch, _ = self._collate(self._dataset.__getitems__(keys))
        return images_of(batch, num_images)

    def state_dict(self, num_batches: int) -> dict[str, Any]:
        """Return the position in this epoch after this rank has trained on `num_batches` of it.

        The training loop counts batches, as the loader reads ahead. The state is the same on all
        ranks.
        """
        assert self._sampler is not None, "only a training loader has a state"
        return self._sampler.state_dict(num_batches * self._batch_size)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state, also with another number of ranks, workers or samples a batch.

        Raises:
            ValueError: the state is of other data, another seed or another order.
        """
        assert self._sampler is not None, "only a training loader has a state"
        self._sampler.load_state_dict(state)

    def start_processes(self) -> None:
        """Start the loading processes of a training loader, where it has any.

        They take seconds to import what they need, while this process may build a model. The first
        loop over the loader finds them started.
        """
        if self._keys is None or not self._loader.num_workers:
            return
        self._keys.holds_back = True  # the epoch and the position in it are not known yet
        try:
            with shared_memory.explained():
                iter(self._loader)
                shared_memory.explain_signals()
        finally:
            self._keys.holds_back = False

    def __iter__(self) -> Iterator[Batch]:
        if self._keys is not None:
            self._check_shared_memory(self._keys)
        with shared_memory.explained():
            batches = iter(self._loader)
            shared_memory.explain_signals()
        for batch, problems in name_dead_workers(batches):
            for problem in problems:
                self._count(problem)
            self.check(batch)
            yield self.transform(batch)

    def _check_shared_memory(self, keys: _EpochKeys) -> None:
        """Check that the batches of all loading processes fit, by the size of one sample.

        Raises:
            RequestError: they do not, so that a bus error may kill a process at any time.
        """
        if self._loader.num_workers == 0 or self._has_room or shared_memory.is_ample():
            return
        self._has_room = True  # checked once: later the batches themselves occupy the memory
        try:
            batch, _ = self._collate(self._dataset.__getitems__([*islice(keys, 1)]))
        except Exception:  # the loading process reports the sample's error
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


def _eval_collate(collate: Callable[..., Any], task: TaskConfig) -> Any:
    # A loss over a batch cannot leave out padding afterwards: without `ignores_padding` a short
    # batch stays short, for which a compiler compiles once more.
    if getattr(models.of_task(task), "ignores_padding", False):
        return collate(task.batch_size)
    return collate()


def images_of(batch: Batch, num_images: int) -> torch.Tensor | None:
    """Return the batch's first images, (n, 3, H, W) uint8; None if it has none."""
    for tensor in nested.tensors_of(batch):
        if tensor.dtype is torch.uint8 and tensor.dim() == 4:
            return tensor[:num_images]
    return None


@dataclasses.dataclass(frozen=True)
class Collate:
    """Builds ((images (N, 3, H, W) uint8, labels (N,)), problems) from samples.

    The images are NHWC in memory, as decoders write them: torch calls that channels_last, and
    nothing is copied twice. With `pad_to`, a short batch is padded with black images of label
    `PADDING_LABEL`, because compilers need one shape.
    """

    pad_to: int = 0

    def __call__(self, samples: list[Sample]) -> tuple[Batch, list[str]]:
        # torch's function, because in a worker process it stacks straight into shared memory.
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
class _EpochCollate:
    """Collates samples that have a key, and mixes them."""

    collate: Callable[[list[Any]], tuple[Batch, list[str]]]
    mixing: Mixing | None

    def __call__(self, batch: _KeyedSamples) -> tuple[Batch, list[str]]:
        collated, problems = self.collate(batch.samples)
        if self.mixing is None:
            return collated, problems
        images_NCHW, labels_N = collated
        images_NHWC = images_NCHW.permute(0, 2, 3, 1)
        mixed_NHWC, weights_NC = self.mixing(images_NHWC, labels_N, batch.key)
        return (mixed_NHWC.permute(0, 3, 1, 2), weights_NC), problems
