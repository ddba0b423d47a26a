"""`--data synthetic`: fixed random batches on the device, to measure without input."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from accbench import data, models
from accbench.config import TaskConfig
from accbench.config.field import flag
from accbench.data import mixing
from accbench.distributed.process_group import Topology


class Source(data.Source):
    """Random batches of the kind that the model takes."""

    gives = None
    ignores_labels = False  # unless the spec says so

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Options of the data source synthetic."""

        num_classes: int | None = flag(
            None,
            "Classes of the random labels, or size of the vocabulary. Unset: 1000, or the model's.",
            minimum=1,
        )
        num_batches: int = flag(2, "Different batches per worker; they take turns.", minimum=1)
        steps_per_epoch: int = flag(100, "Steps that count as one epoch.", minimum=1)

    @classmethod
    def check(cls, location: str | None) -> None:
        return  # there is nothing that could be missing

    def __init__(
        self, location: str | None, task: TaskConfig, options: Options, topology: Topology
    ) -> None:
        self.options = options
        spec = models.of_task(task)
        self.num_classes = options.num_classes or spec.usual_num_classes
        generator = torch.Generator().manual_seed(data.seed_of_rank(task, topology))
        assert task.batch_size is not None
        self.batches: list[data.Batch] = [
            spec.synthetic_batch(task.batch_size, self.num_classes, generator)
            for _ in range(options.num_batches)
        ]
        mix = mixing.of_task(task, self.num_classes)
        if mix is not None:
            for index, (images_NCHW, labels_N) in enumerate(self.batches):
                mixed, weights_NC = mix(images_NCHW.permute(0, 2, 3, 1), labels_N, index)
                self.batches[index] = mixed.permute(0, 3, 1, 2), weights_NC

    def train_loader(self) -> "FixedBatches":
        return FixedBatches(self.batches, self.options.steps_per_epoch)


class FixedBatches:
    """A loader whose batches engines copy to the device once."""

    resident = True
    num_bad_samples = 0

    def __init__(self, batches: list[data.Batch], num_steps: int) -> None:
        self.batches, self.num_steps = batches, num_steps
        self.check: Callable[[data.Batch], None] = lambda batch: None
        self.transform: Callable[[data.Batch], data.Batch] = lambda batch: batch
        self.epoch = 0
        self.num_done = 0
        """Steps of this epoch that an earlier process has done."""

    def __len__(self) -> int:
        return self.num_steps - self.num_done

    def __iter__(self) -> Iterator[data.Batch]:
        for batch in self.batches:
            self.check(batch)
            yield self.transform(batch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; epochs differ only in where they begin."""
        if epoch != self.epoch:
            self.epoch, self.num_done = epoch, 0

    def preview(self, num_images: int) -> torch.Tensor | None:
        """Return the first images, as `data.Loader.preview` does."""
        return data.images_of(self.batches[0], num_images)

    def state_dict(self, num_batches: int) -> dict[str, Any]:
        """Return the position in the epoch, as `data.Loader.state_dict` does."""
        return {"epoch": self.epoch, "num_done": self.num_done + num_batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state, as `data.Loader.load_state_dict` does.

        Raises:
            ValueError: the state is not of synthetic data.
        """
        if "num_done" not in state:
            raise ValueError("the loader's state is not of synthetic data")
        self.epoch, self.num_done = state["epoch"], min(state["num_done"], self.num_steps)
