"""The model as the training loop sees it: the base class of every spec."""

import abc
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils import _pytree

IMAGES, TOKENS = "images", "tokens"


class Wrapper(nn.Module):
    """A network `net` with work around it that needs no weights, such as normalising its images.

    Exported weights are those of `net`.
    """

    net: nn.Module


class Spec(abc.ABC):
    """A model, its loss and its batches; a subclass sets `name`.

    If a spec is a dataclass, the flags of the same names set its fields `image_size`, `seq_len`
    and `label_smoothing`.
    """

    name: str
    takes: ClassVar[str] = "batches"
    """The kind of batches; must equal the data source's `gives`."""
    unit: ClassVar[str] = "samples"
    """The unit of throughput, in the plural."""
    mixes: ClassVar[bool] = False
    """Whether the loss accepts class weights in place of labels."""
    usual_num_classes: ClassVar[int] = 1000
    """Default number of classes, or vocabulary size, of `--data synthetic`."""
    ignores_labels: ClassVar[bool] = False
    """Whether labels are ignored whatever the data: the model leaves some out, or `synthetic_batch`
    does."""
    ignores_padding: ClassVar[bool] = False
    """Whether `score` leaves out samples whose labels are all ignored; only then are the short
    batches of an evaluation padded with such samples, so that all have one shape."""

    @property
    def units_per_sample(self) -> int:
        """Units of throughput in a sample, such as its tokens; 1 if samples are the unit."""
        return 1

    @property
    def counts_labels(self) -> bool:
        """Whether `loss` is a mean over labels, which a subclass's `count_labels` counts."""
        return type(self).count_labels is not Spec.count_labels

    def count_labels(self, batch: Any) -> int:
        """Count the labels in a batch on the host that the loss is a mean over."""
        raise NotImplementedError

    def with_label_counts(self, batch: Any, labels_N: torch.Tensor) -> Any:
        """Return a batch whose loss is divided by a count of labels of more than the batch.

        Args:
            batch: on any device.
            labels_N: labels to divide by, float32; `loss` of any rows divides by the sum of these.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def build(self, num_classes: int) -> nn.Module:
        """Build the model on the host, with weights drawn from torch's global generator."""

    @abc.abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Compute the mean loss over the batch, (); runs under autocast."""

    def score(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return sums over the batch's units: loss, top-1, top-5 and number of units; (4,).

        Top-1 and top-5 are NaN if the model does not define them.
        """
        num_units = len(_pytree.tree_leaves(batch)[0]) * self.units_per_sample
        loss = self.loss(model, batch).float() * num_units
        undefined = torch.full_like(loss, float("nan"))
        return torch.stack([loss, undefined, undefined, torch.full_like(loss, num_units)])

    @abc.abstractmethod
    def synthetic_batch(self, batch_size: int, num_classes: int, generator: torch.Generator) -> Any:
        """Return a random batch on the host: tensors nested in tuples, lists and mappings."""

    def problem(self, batch: Any, num_classes: int) -> str | None:
        """Return what is wrong with a batch on the host, such as unknown labels, or None.

        Some devices silently read out of bounds at a wrong index, and train on.
        """
        return None


def out_of_range(name: str, tensor: torch.Tensor, num_classes: int, least: int = 0) -> str | None:
    """Return a line about integers outside least..num_classes-1; None if there are none."""
    if tensor.is_floating_point() or not tensor.numel():
        return None
    low, high = (int(value) for value in tensor.aminmax())
    if least <= low and high < num_classes:
        return None
    return f"{name} from {low} to {high}, where the model has {num_classes}, 0 to {num_classes - 1}"
