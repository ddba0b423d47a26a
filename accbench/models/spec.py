"""What a model is to the training loop: the class that every spec is of."""

import abc
from typing import Any, ClassVar

import torch
from torch import nn

from accbench.data import nested

IMAGES, TOKENS = "images", "tokens"


class Spec(abc.ABC):
    """A model, its loss and its batches. Give it a `name`.

    Fields `image_size`, `seq_len` and `label_smoothing` of a spec that is a dataclass are set
    from the flags of those names.
    """

    name: str
    takes: ClassVar[str] = "batches"
    """The kind of batches, to be the same as the data source's `gives`."""
    unit: ClassVar[str] = "samples"
    """What throughput is counted in, in the plural."""
    mixes: ClassVar[bool] = False
    """Whether the loss takes weights of several classes in place of labels."""
    usual_num_classes: ClassVar[int] = 1000
    """What `--data synthetic` has where nothing else is asked for: classes, or a vocabulary."""

    @property
    def units_per_sample(self) -> int:
        """Tokens of a text, for one; 1 where samples are counted."""
        return 1

    @abc.abstractmethod
    def build(self, num_classes: int) -> nn.Module:
        """The model on the host, weights drawn from torch's global generator."""

    @abc.abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The mean over the batch, (); runs under autocast."""

    def score(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Sums over what counts in the batch: loss, top-1, top-5 and their number; (4,).

        Top-1 and top-5 are NaN where a model has no such thing.
        """
        number = len(nested.tensors_of(batch)[0]) * self.units_per_sample
        loss = self.loss(model, batch).float() * number
        unknown = torch.full_like(loss, float("nan"))
        return torch.stack([loss, unknown, unknown, torch.full_like(loss, number)])

    @abc.abstractmethod
    def synthetic_batch(self, batch_size: int, num_classes: int, generator: torch.Generator) -> Any:
        """A random batch on the host: tensors in any nesting of tuples, lists and mappings."""

    def problem(self, batch: Any, num_classes: int) -> str | None:
        """What is wrong with a batch on the host, such as labels that the model does not have.

        Some devices read whatever lies at a wrong index, and train on.
        """
        return None


def out_of_range(name: str, tensor: torch.Tensor, num_classes: int, least: int = 0) -> str | None:
    """A line on integers that are not in least..num_classes-1; None if all are."""
    if tensor.is_floating_point() or not tensor.numel():
        return None
    low, high = (int(value) for value in tensor.aminmax())
    if least <= low and high < num_classes:
        return None
    return f"{name} from {low} to {high}, where the model has {num_classes}, 0 to {num_classes - 1}"
