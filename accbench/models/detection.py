"""Images to boxes, by the detectors of torchvision and their own losses."""

import dataclasses
from typing import Any, ClassVar

import torch
from torch import nn

from accbench.errors import RequestError
from accbench.models.spec import Spec, out_of_range

BACKGROUND = 0
"""The class that torchvision's detectors keep for it; here also the label of padding."""
# Of torchvision's keypoint detectors: those of COCO's persons.
_NUM_KEYPOINTS = 17
# Of a synthetic image; the last of them is padding.
_NUM_OBJECTS = 4
# Detectors whose anchors are made for one size.
SIZES = {"ssd300_vgg16": 300, "ssdlite320_mobilenet_v3_large": 320}
# What detectors learn besides boxes and classes.
_WANTED = {"maskrcnn": "masks", "keypointrcnn": "keypoints"}


class Detector(nn.Module):
    """A detector behind uint8 images and padded targets. It gives losses, in evaluation too."""

    scale: torch.Tensor

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("scale", torch.tensor(1 / 255), persistent=False)

    def train(self, mode: bool = True) -> "Detector":
        """In evaluation only norms and dropout are as they then are, for torchvision's detectors
        have no losses outside training."""
        super().train(mode)
        for module in self.net.modules():
            kept = isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.Dropout))
            module.training = mode or not kept
        return self

    def forward(
        self, images_NCHW: torch.Tensor, targets: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The losses, name -> ()."""
        images = list(images_NCHW.to(self.scale.dtype) * self.scale)
        losses: dict[str, torch.Tensor] = self.net(images, unpadded(targets))
        return losses


def unpadded(targets: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Targets (N, M, ...) as torchvision wants them: of each image those that are no padding."""
    is_object_NM = targets["labels"] != BACKGROUND
    return [
        {name: tensor[index][is_object_NM[index]] for name, tensor in targets.items()}
        for index in range(len(is_object_NM))
    ]


@dataclasses.dataclass(frozen=True)
class Detection(Spec):
    """Images (N, 3, H, W) uint8, and a mapping of what is on them, at most M objects each.

    boxes (N, M, 4): left, top, right, bottom in pixels. labels (N, M) int64: 1 and more, 0 where
    there is no further object. For Mask R-CNN masks (N, M, H, W) uint8 of 0 and 1; for Keypoint
    R-CNN keypoints (N, M, 17, 3): x and y in pixels, and 1 where visible.

    Images are trained at the size they come in: torchvision's own resizing draws a size from a
    generator, even of one. The network's own loss is the sum of its parts.
    """

    takes: ClassVar = "images with boxes"
    unit: ClassVar = "images"
    usual_num_classes: ClassVar = 91
    name: str
    image_size: int = 224
    """Height and width in pixels."""

    def __post_init__(self) -> None:
        size = SIZES.get(self._function, self.image_size)
        if self.image_size != size:
            raise RequestError(
                f"--model {self.name} takes images of {size} pixels, not of {self.image_size}; "
                f"give --image_size {size}"
            )

    @property
    def _function(self) -> str:
        return self.name.partition(":")[2]

    def build(self, num_classes: int) -> nn.Module:
        """The model on the host; class 0 is the background.

        Raises:
            RequestError: there is no other class.
        """
        from torchvision import models

        size = self.image_size
        if num_classes < 2:
            raise RequestError(f"--model {self.name} wants 2 classes or more: 0 is the background")
        sizes = {} if self._function in SIZES else {"min_size": size, "max_size": size}
        net = models.get_model(
            self._function, weights=None, weights_backbone=None, num_classes=num_classes,
            _skip_resize=True, **sizes,
        )  # fmt: skip
        return Detector(net)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The sum of the detector's losses."""
        losses = list(model(*batch).values())
        wide = torch.promote_types(losses[0].dtype, torch.float32)
        return torch.stack([loss.to(wide) for loss in losses]).sum()

    def synthetic_batch(self, batch_size: int, num_classes: int, generator: torch.Generator) -> Any:
        """Random bytes, three boxes and a padded one on each image."""
        size, shape_NM = self.image_size, (batch_size, _NUM_OBJECTS)
        images_NCHW = torch.randint(
            0, 256, (batch_size, 3, size, size), dtype=torch.uint8, generator=generator
        )
        corners_NM2 = torch.rand(*shape_NM, 2, generator=generator) * size / 2
        sides_NM2 = (torch.rand(*shape_NM, 2, generator=generator) + 1) * size / 4
        boxes_NM4 = torch.cat([corners_NM2, corners_NM2 + sides_NM2], dim=2)
        labels_NM = torch.randint(1, max(num_classes, 2), shape_NM, generator=generator)
        boxes_NM4[:, -1], labels_NM[:, -1] = 0, BACKGROUND
        targets = {"boxes": boxes_NM4, "labels": labels_NM}
        if self._function.startswith("maskrcnn"):
            targets["masks"] = _filled(boxes_NM4, size)
        if self._function.startswith("keypointrcnn"):
            shape = (*shape_NM, _NUM_KEYPOINTS, 2)
            inside = corners_NM2[:, :, None] + sides_NM2[:, :, None] * torch.rand(
                shape, generator=generator
            )
            targets["keypoints"] = torch.cat([inside, torch.ones(*shape[:-1], 1)], dim=3)
        return images_NCHW, targets

    def problem(self, batch: Any, num_classes: int) -> str | None:
        """Labels that the model has not, boxes without an inside, or what it wants besides."""
        boxes_NM4, labels_NM = batch[1]["boxes"], batch[1]["labels"]
        height, width = batch[0].shape[-2:]
        size = SIZES.get(self._function)
        if size and (height, width) != (size, size):
            return (
                f"--model {self.name} takes images of {size} x {size} pixels, not of {height} x "
                f"{width}; the data source coco makes them so by --coco.shape square"
            )
        for family, wanted in _WANTED.items():
            if self._function.startswith(family) and wanted not in batch[1]:
                return f"--model {self.name} learns {wanted}, which the data has not"
        sides = boxes_NM4[..., 2:] - boxes_NM4[..., :2]
        if (sides[labels_NM != BACKGROUND] <= 0).any():
            return "there are boxes whose right is not right of their left, or bottom below top"
        return out_of_range("labels are", labels_NM, num_classes)


def _filled(boxes_NM4: torch.Tensor, size: int) -> torch.Tensor:
    """Masks (N, M, H, W) of the boxes' insides."""
    left, top, right, bottom = (edge[..., None, None] for edge in boxes_NM4.unbind(2))
    at = torch.arange(size)
    x, y = at[None, None, None, :], at[None, None, :, None]
    return ((left <= x) & (x < right) & (top <= y) & (y < bottom)).to(torch.uint8)
