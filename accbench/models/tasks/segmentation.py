"""Semantic segmentation, with the loss of torchvision's reference training."""

import dataclasses
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from accbench.models.tasks.classification import Normalized
from accbench.models.tasks.spec import Spec, out_of_range

IGNORED = 255
"""The class of pixels that loss and scores ignore, as in VOC's masks."""
_AUXILIARY_WEIGHT = 0.5


@dataclasses.dataclass(frozen=True)
class Segmentation(Spec):
    """A segmentation model: images (N, 3, H, W) uint8, class masks (N, H, W) int64, cross-entropy.

    Source of the loss: references/segmentation/train.py of torchvision.
    """

    takes: ClassVar = "images with masks"
    unit: ClassVar = "images"
    usual_num_classes: ClassVar = 21
    ignores_padding: ClassVar = True
    name: str
    image_size: int = 224
    """Height and width in pixels."""

    def build(self, num_classes: int) -> nn.Module:
        """Build the model on the host, with an auxiliary classifier if the architecture has one."""
        from torchvision import models

        name = self.name.partition(":")[2]
        options = {} if name.startswith("lraspp") else {"aux_loss": True}
        net = models.get_model(
            name, weights=None, weights_backbone=None, num_classes=num_classes, **options
        )
        return Normalized(net)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Compute the mean over counted pixels, plus half of the auxiliary classifier's.

        It is 0 where there are none. A batch with `with_label_counts` is a part of more.
        """
        images_NCHW, masks_NHW, *counts = batch
        output = model(images_NCHW)
        total = _summed_cross_entropy(output["out"], masks_NHW)
        if "aux" in output:
            total = total + _AUXILIARY_WEIGHT * _summed_cross_entropy(output["aux"], masks_NHW)
        num_pixels = counts[0].sum() if counts else (masks_NHW != IGNORED).sum()
        return total / torch.where(num_pixels > 0, num_pixels, 1)

    def count_labels(self, batch: Any) -> int:
        """Count the pixels of a batch on the host whose class counts."""
        return int((batch[1] != IGNORED).sum())

    def with_label_counts(self, batch: Any, labels_N: torch.Tensor) -> Any:
        """See the base class."""
        return *batch[:2], labels_N

    def score(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return sums over the counted pixels: loss, correct ones, NaN, number of pixels; (4,)."""
        images_NCHW, masks_NHW, *_ = batch
        logits_NCHW = model(images_NCHW)["out"]
        is_counted_NHW = masks_NHW != IGNORED
        is_correct_NHW = (logits_NCHW.argmax(dim=1) == masks_NHW) & is_counted_NHW
        loss = _summed_cross_entropy(logits_NCHW, masks_NHW).float()
        undefined = torch.full_like(loss, float("nan"))
        return torch.stack(
            [loss, is_correct_NHW.sum().float(), undefined, is_counted_NHW.sum().float()]
        )

    def synthetic_batch(self, batch_size: int, num_classes: int, generator: torch.Generator) -> Any:
        """Return random images and class masks; the first row of pixels is ignored."""
        size = self.image_size
        images_NCHW = torch.randint(
            0, 256, (batch_size, 3, size, size), dtype=torch.uint8, generator=generator
        )
        masks_NHW = torch.randint(0, num_classes, (batch_size, size, size), generator=generator)
        masks_NHW[:, 0] = IGNORED
        return images_NCHW, masks_NHW

    def problem(self, batch: Any, num_classes: int) -> str | None:
        """Return a line about classes that the model lacks."""
        masks_NHW = batch[1]
        return out_of_range("masks are", masks_NHW[masks_NHW != IGNORED], num_classes)


def _summed_cross_entropy(logits_NCHW: torch.Tensor, masks_NHW: torch.Tensor) -> torch.Tensor:
    loss_dtype = torch.promote_types(logits_NCHW.dtype, torch.float32)
    return functional.cross_entropy(
        logits_NCHW.to(loss_dtype), masks_NHW, ignore_index=IGNORED, reduction="sum"
    )
