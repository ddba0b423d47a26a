"""Images to a class for each pixel, as torchvision's reference training has it."""

import dataclasses
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from accbench.models.classification import Normalized
from accbench.models.spec import Spec, out_of_range

IGNORED = 255
"""The class of pixels that count for nothing, in the masks of VOC for one."""
_AUXILIARY_WEIGHT = 0.5


@dataclasses.dataclass(frozen=True)
class Segmentation(Spec):
    """Images (N, 3, H, W) uint8 and masks (N, H, W) int64 of classes; cross-entropy.

    Source of the loss: references/segmentation/train.py of torchvision.
    """

    takes: ClassVar = "images with masks"
    unit: ClassVar = "images"
    usual_num_classes: ClassVar = 21
    name: str
    image_size: int = 224
    """Height and width in pixels."""

    def build(self, num_classes: int) -> nn.Module:
        """The model on the host, with the classifier on the way where it can have one."""
        from torchvision import models

        name = self.name.partition(":")[2]
        options = {} if name.startswith("lraspp") else {"aux_loss": True}
        net = models.get_model(
            name, weights=None, weights_backbone=None, num_classes=num_classes, **options
        )
        return Normalized(net)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Mean over the pixels that count, and half of that of the classifier on the way."""
        images_NCHW, masks_NHW = batch
        output = model(images_NCHW)
        loss = _cross_entropy(output["out"], masks_NHW)
        if "aux" in output:
            loss = loss + _AUXILIARY_WEIGHT * _cross_entropy(output["aux"], masks_NHW)
        return loss

    def score(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Sums over the pixels that count: loss, right ones, NaN, their number; (4,)."""
        images_NCHW, masks_NHW = batch
        logits_NCHW = model(images_NCHW)["out"]
        valid_NHW = masks_NHW != IGNORED
        right_NHW = (logits_NCHW.argmax(dim=1) == masks_NHW) & valid_NHW
        loss = _cross_entropy(logits_NCHW, masks_NHW, reduction="sum").float()
        unknown = torch.full_like(loss, float("nan"))
        return torch.stack([loss, right_NHW.sum().float(), unknown, valid_NHW.sum().float()])

    def synthetic_batch(self, batch_size: int, num_classes: int, generator: torch.Generator) -> Any:
        """Random bytes and classes; the first row of pixels counts for nothing."""
        size = self.image_size
        images_NCHW = torch.randint(
            0, 256, (batch_size, 3, size, size), dtype=torch.uint8, generator=generator
        )
        masks_NHW = torch.randint(0, num_classes, (batch_size, size, size), generator=generator)
        masks_NHW[:, 0] = IGNORED
        return images_NCHW, masks_NHW

    def problem(self, batch: Any, num_classes: int) -> str | None:
        """Classes that the model has not."""
        masks_NHW = batch[1]
        return out_of_range("masks are", masks_NHW[masks_NHW != IGNORED], num_classes)


def _cross_entropy(
    logits_NCHW: torch.Tensor, masks_NHW: torch.Tensor, reduction: str = "mean"
) -> torch.Tensor:
    wide = torch.promote_types(logits_NCHW.dtype, torch.float32)
    return functional.cross_entropy(
        logits_NCHW.to(wide), masks_NHW, ignore_index=IGNORED, reduction=reduction
    )
