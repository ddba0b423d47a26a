"""Image classification: the network's wrapper, its loss and its scores."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from accbench.errors import RequestError
from accbench.models.tasks.spec import IMAGES, Spec, Wrapper, out_of_range

# Per channel, for images scaled to 0..1; the ImageNet values that torchvision documents.
_MEAN = (0.485, 0.456, 0.406)
_STD = (0.229, 0.224, 0.225)


def logits_of(output: Any) -> torch.Tensor:
    """Return the logits in a model's output.

    The output is the tensor itself, a tuple or list that begins with it, or a mapping or an object
    that holds it as `logits`, `out` or `output`.

    Raises:
        RequestError: the output holds no logits.
    """
    if isinstance(output, torch.Tensor):
        return output
    for name in ("logits", "out", "output"):
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(value, torch.Tensor):
            return value
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], torch.Tensor):
        return output[0]
    raise RequestError(
        f"the model returns {type(output).__name__}, in which no logits were found; return a "
        "tensor, a tuple that begins with it, or a mapping with 'logits'; or write a spec with a "
        "loss of its own, see docs/models.md"
    )


def _auxiliary_logits(output: Any) -> list[torch.Tensor]:
    """Return the auxiliary logits in an output of torchvision's GoogLeNet or Inception."""
    fields = getattr(output, "_fields", ())
    values = [getattr(output, name) for name in fields if name.startswith("aux_logits")]
    return [logits for logits in values if isinstance(logits, torch.Tensor)]


class Normalized(Wrapper):
    """A network that first normalises its uint8 images.

    The images are copied to the device as bytes and normalised there: a quarter of the copy.
    """

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        scale = 1 / (255 * torch.tensor(_STD))
        self.register_buffer("scale", scale.view(1, 3, 1, 1), persistent=False)
        shift = -torch.tensor(_MEAN) / torch.tensor(_STD)
        self.register_buffer("shift", shift.view(1, 3, 1, 1), persistent=False)

    def forward(self, images_NCHW: torch.Tensor, *others: torch.Tensor) -> Any:
        """Return the network's output for uint8 images (N, 3, H, W), and what else it takes."""
        return self.net(images_NCHW.to(self.scale.dtype) * self.scale + self.shift, *others)


class Classifier(Normalized):
    """A network that first normalises its uint8 images and returns logits."""

    def __init__(self, net: nn.Module, num_classes: int) -> None:
        super().__init__(net)
        self.num_classes = num_classes

    def forward(self, images_NCHW: torch.Tensor, *others: torch.Tensor) -> Any:
        """Return the network's output for uint8 images (N, 3, H, W), which holds the logits.

        Raises:
            RequestError: there are no logits (N, num_classes or more).
        """
        output = super().forward(images_NCHW, *others)
        shape = logits_of(output).shape
        if len(shape) != 2 or shape[1] < self.num_classes:
            raise RequestError(
                f"the data has {self.num_classes} classes, and the model's logits are of shape "
                f"{tuple(shape)}, not (batch, {self.num_classes})"
            )
        return output


def sums_of_logits(logits_NC: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """Return sums over the samples with a label >= 0: loss, top-1, top-5, samples; (4,)."""
    logits_NC = logits_NC.float()
    valid_N = labels_N >= 0
    loss = functional.cross_entropy(logits_NC, labels_N, ignore_index=-1, reduction="sum")
    best_N5 = logits_NC.topk(min(5, logits_NC.shape[1]), dim=1).indices
    hits_N5 = (best_N5 == labels_N.unsqueeze(1)) & valid_N.unsqueeze(1)
    return torch.stack(
        [loss, hits_N5[:, 0].sum().float(), hits_N5.sum().float(), valid_N.sum().float()]
    )


@dataclasses.dataclass(frozen=True)
class ImageClassification(Spec):
    """An image classifier: images (N, 3, H, W) uint8, labels (N,) int64, cross-entropy."""

    takes: ClassVar = IMAGES
    unit: ClassVar = "images"
    mixes: ClassVar = True
    ignores_padding: ClassVar = True
    name: str
    build_net: Callable[..., nn.Module]
    """Called with num_classes; its module maps normalised images to logits."""
    label_smoothing: float = 0.0
    """Fraction of each label that the loss spreads over all classes."""
    image_size: int = 224
    """Height and width in pixels."""
    auxiliary_weight: float = 0.3
    """Weight of each auxiliary classifier's loss."""

    def build(self, num_classes: int) -> nn.Module:
        """Build the model on the host, with weights drawn from torch's global generator."""
        return Classifier(self.build_net(num_classes=num_classes), num_classes)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Compute the mean loss over the batch, in float32 or the model's wider dtype.

        Labels may also be class weights (N, num_classes), as mixup and cutmix make them.
        """
        images_NCHW, labels = batch
        output = model(images_NCHW)
        loss = self.loss_of_logits(logits_of(output), labels)
        for logits_NC in _auxiliary_logits(output):
            loss = loss + self.auxiliary_weight * self.loss_of_logits(logits_NC, labels)
        return loss

    def loss_of_logits(self, logits_NC: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Compute the mean cross-entropy of logits; labels are as `loss` takes them."""
        logits_NC = logits_NC.to(torch.promote_types(logits_NC.dtype, torch.float32))
        if labels.is_floating_point():
            labels = labels.to(logits_NC.dtype)
        return functional.cross_entropy(logits_NC, labels, label_smoothing=self.label_smoothing)

    def score(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return sums over the samples with a label >= 0: loss, top-1, top-5, samples; (4,).

        A sample with class weights counts as the class with the largest weight.
        """
        images_NCHW, labels_N = batch
        if labels_N.is_floating_point():
            labels_N = labels_N.argmax(dim=1)
        return sums_of_logits(logits_of(model(images_NCHW)), labels_N)

    def synthetic_batch(self, batch_size: int, num_classes: int, generator: torch.Generator) -> Any:
        """Return random images, NHWC in memory as decoders write them, and random labels."""
        shape_NHWC = (batch_size, self.image_size, self.image_size, 3)
        images_NHWC = torch.randint(0, 256, shape_NHWC, dtype=torch.uint8, generator=generator)
        labels_N = torch.randint(0, num_classes, (batch_size,), generator=generator)
        return images_NHWC.permute(0, 3, 1, 2), labels_N

    def problem(self, batch: Any, num_classes: int) -> str | None:
        """Return a line about labels without a class in the model; -1 marks padding and is fine."""
        return out_of_range("labels are", batch[1], num_classes, least=-1)
