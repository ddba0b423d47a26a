"""Images to classes: what the loss of classifiers takes, whatever form their logits come in."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from accbench.errors import RequestError
from accbench.models.spec import IMAGES, Spec, out_of_range

# Per channel, of images scaled to 0..1; the ImageNet values that torchvision documents.
_MEAN = (0.485, 0.456, 0.406)
_STD = (0.229, 0.224, 0.225)


def logits_of(output: Any) -> torch.Tensor:
    """The logits in what a model returns: a tensor, or the first of a tuple, or named `logits`,
    `out` or `output` in a mapping or an object.

    Raises:
        RequestError: there are none.
    """
    if isinstance(output, torch.Tensor):
        return output
    for name in ("logits", "out", "output"):
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(found, torch.Tensor):
            return found
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], torch.Tensor):
        return output[0]
    raise RequestError(
        f"the model returns {type(output).__name__}, in which no logits were found; return a "
        "tensor, a tuple that begins with it, or a mapping with 'logits'; or write a spec with a "
        "loss of its own, see docs/models.md"
    )


def _auxiliary_logits(output: Any) -> list[torch.Tensor]:
    """Those of torchvision's GoogLeNet and Inception, which have more than one classifier."""
    fields = getattr(output, "_fields", ())
    found = [getattr(output, name) for name in fields if name.startswith("aux_logits")]
    return [logits for logits in found if isinstance(logits, torch.Tensor)]


class Normalized(nn.Module):
    """A network behind the normalisation of uint8 images.

    Bytes travel to the device and are normalised there: a quarter of the copy.
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

    def forward(self, images_NCHW: torch.Tensor) -> Any:
        """uint8 (N, 3, H, W) to what the network returns."""
        return self.net(images_NCHW.to(self.scale.dtype) * self.scale + self.shift)


class Classifier(Normalized):
    """A network that gives logits, behind the normalisation of uint8 images."""

    def __init__(self, net: nn.Module, num_classes: int) -> None:
        super().__init__(net)
        self.num_classes = num_classes

    def forward(self, images_NCHW: torch.Tensor) -> Any:
        """uint8 (N, 3, H, W) to what the network returns, logits (N, num_classes) for one.

        Raises:
            RequestError: those are fewer classes, or none.
        """
        output = super().forward(images_NCHW)
        shape = logits_of(output).shape
        if len(shape) != 2 or shape[1] < self.num_classes:
            raise RequestError(
                f"the data has {self.num_classes} classes, and the model's logits are of shape "
                f"{tuple(shape)}, not (batch, {self.num_classes})"
            )
        return output


def sums_of_logits(logits_NC: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """Sums over the samples whose label is not negative: loss, top-1, top-5, samples; (4,)."""
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
    """Images (N, 3, H, W) uint8 and labels (N,) int64; cross-entropy."""

    takes: ClassVar = IMAGES
    unit: ClassVar = "images"
    mixes: ClassVar = True
    name: str
    build_net: Callable[..., nn.Module]
    """Called with num_classes; its module maps normalised images to logits."""
    label_smoothing: float = 0.0
    """Part of each label that the loss spreads over all classes."""
    image_size: int = 224
    """Height and width in pixels."""
    auxiliary_weight: float = 0.3
    """Of the loss of each classifier that a network has beside its last."""

    def build(self, num_classes: int) -> nn.Module:
        """The model on the host, weights drawn from torch's global generator."""
        return Classifier(self.build_net(num_classes=num_classes), num_classes)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Mean over the batch, in float32 or in the model's own type where that is wider.

        Labels may be weights of all classes as well, (N, num_classes).
        """
        images_NCHW, labels = batch
        output = model(images_NCHW)
        loss = self.loss_of_logits(logits_of(output), labels)
        for logits_NC in _auxiliary_logits(output):
            loss = loss + self.auxiliary_weight * self.loss_of_logits(logits_NC, labels)
        return loss

    def loss_of_logits(self, logits_NC: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Likewise."""
        logits_NC = logits_NC.to(torch.promote_types(logits_NC.dtype, torch.float32))
        if labels.is_floating_point():
            labels = labels.to(logits_NC.dtype)
        return functional.cross_entropy(logits_NC, labels, label_smoothing=self.label_smoothing)

    def score(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Sums over the samples whose label is not negative: loss, top-1, top-5, samples; (4,).

        Of a sample with several classes the one of the largest weight counts.
        """
        images_NCHW, labels_N = batch
        if labels_N.is_floating_point():
            labels_N = labels_N.argmax(dim=1)
        return sums_of_logits(logits_of(model(images_NCHW)), labels_N)

    def synthetic_batch(self, batch_size: int, num_classes: int, generator: torch.Generator) -> Any:
        """Random bytes and labels; NHWC in memory, as decoders write images."""
        shape_NHWC = (batch_size, self.image_size, self.image_size, 3)
        images_NHWC = torch.randint(0, 256, shape_NHWC, dtype=torch.uint8, generator=generator)
        labels_N = torch.randint(0, num_classes, (batch_size,), generator=generator)
        return images_NHWC.permute(0, 3, 1, 2), labels_N

    def problem(self, batch: Any, num_classes: int) -> str | None:
        """Labels that the model has no class for; padding's -1 is none."""
        return out_of_range("labels are", batch[1], num_classes, least=-1)
