"""Object detection with torchvision's detectors and their own losses."""

import dataclasses
from typing import Any, ClassVar

import torch
from torch import nn

from accbench.errors import RequestError
from accbench.models.tasks.spec import Spec, Wrapper, out_of_range

BACKGROUND = 0
"""The class that torchvision's detectors reserve for background; padding has this label too."""
# Keypoints of a person in COCO, which torchvision's keypoint detectors predict.
_NUM_KEYPOINTS = 17
# Objects in a synthetic image; the last of them is padding.
_NUM_OBJECTS = 4
# Detectors whose anchors are made for one size.
SIZES = {"ssd300_vgg16": 300, "ssdlite320_mobilenet_v3_large": 320}
# Detector family -> the target that it needs besides boxes and labels.
_EXTRA_TARGETS = {"maskrcnn": "masks", "keypointrcnn": "keypoints"}


class Detector(Wrapper):
    """A detector that maps uint8 images and padded targets to losses, also in evaluation."""

    scale: torch.Tensor

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("scale", torch.tensor(1 / 255), persistent=False)

    def train(self, mode: bool = True) -> "Detector":
        """Set training mode; in evaluation only batch norm and dropout leave it.

        torchvision's detectors return losses in training mode alone.
        """
        super().train(mode)
        for module in self.net.modules():
            has_eval_mode = isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.Dropout))
            module.training = mode or not has_eval_mode
        return self

    def forward(
        self, images_NCHW: torch.Tensor, targets: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the losses by name, each of shape ()."""
        images = list(images_NCHW.to(self.scale.dtype) * self.scale)
        losses: dict[str, torch.Tensor] = self.net(images, unpadded(targets))
        return losses


def unpadded(targets: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Convert padded targets (N, M, ...) to torchvision's: a dict per image, without padding."""
    is_object_NM = targets["labels"] != BACKGROUND
    return [
        {name: tensor[index][is_object_NM[index]] for name, tensor in targets.items()}
        for index in range(len(is_object_NM))
    ]


@dataclasses.dataclass(frozen=True)
class Detection(Spec):
    """A detector; a batch is images (N, 3, H, W) uint8 and a mapping of targets, M per image.

    boxes (N, M, 4): left, top, right, bottom in pixels. labels (N, M) int64: 1 and more, 0 for
    padding. For Mask R-CNN masks (N, M, H, W) uint8 of 0 and 1; for Keypoint R-CNN keypoints
    (N, M, 17, 3): x and y in pixels, and 1 where visible.

    Images are trained at the size they come in: torchvision's own resizing draws a size from a
    random generator, even if there is only one. The loss is the sum of the network's losses.
    """

    takes: ClassVar = "images with boxes"
    unit: ClassVar = "images"
    usual_num_classes: ClassVar = 91
    name: str
    image_size: int = 224
    """Height and width in pixels."""

    def __post_init__(self) -> None:
        size = SIZES.get(self._builder_name, self.image_size)
        if self.image_size != size:
            raise RequestError(
                f"--model {self.name} takes images of {size} pixels, not of {self.image_size}; "
                f"give --image_size {size}"
            )

    @property
    def _builder_name(self) -> str:
        return self.name.partition(":")[2]

    def build(self, num_classes: int) -> nn.Module:
        """Build the model on the host; class 0 is the background.

        Raises:
            RequestError: `num_classes` is below 2, so that there is only background.
        """
        from torchvision import models

        size = self.image_size
        if num_classes < 2:
            raise RequestError(f"--model {self.name} wants 2 classes or more: 0 is the background")
        sizes = {} if self._builder_name in SIZES else {"min_size": size, "max_size": size}
        net = models.get_model(
            self._builder_name, weights=None, weights_backbone=None, num_classes=num_classes,
            _skip_resize=True, **sizes,
        )  # fmt: skip
        return Detector(net)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Compute the sum of the detector's losses."""
        losses = list(model(*batch).values())
        wide = torch.promote_types(losses[0].dtype, torch.float32)
        return torch.stack([loss.to(wide) for loss in losses]).sum()

    def synthetic_batch(self, batch_size: int, num_classes: int, generator: torch.Generator) -> Any:
        """Return random images, each with three boxes and one padding box."""
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
        if self._builder_name.startswith("maskrcnn"):
            targets["masks"] = _box_masks(boxes_NM4, size)
        if self._builder_name.startswith("keypointrcnn"):
            shape = (*shape_NM, _NUM_KEYPOINTS, 2)
            inside = corners_NM2[:, :, None] + sides_NM2[:, :, None] * torch.rand(
                shape, generator=generator
            )
            targets["keypoints"] = torch.cat([inside, torch.ones(*shape[:-1], 1)], dim=3)
        return images_NCHW, targets

    def problem(self, batch: Any, num_classes: int) -> str | None:
        """Return a line about wrong image sizes, missing targets, empty boxes or unknown labels."""
        boxes_NM4, labels_NM = batch[1]["boxes"], batch[1]["labels"]
        height, width = batch[0].shape[-2:]
        size = SIZES.get(self._builder_name)
        if size and (height, width) != (size, size):
            return (
                f"--model {self.name} takes images of {size} x {size} pixels, not of {height} x "
                f"{width}; the data source coco makes them so by --coco.shape square"
            )
        for family, target in _EXTRA_TARGETS.items():
            if self._builder_name.startswith(family) and target not in batch[1]:
                return f"--model {self.name} learns {target}, which the data lacks"
        sides = boxes_NM4[..., 2:] - boxes_NM4[..., :2]
        if (sides[labels_NM != BACKGROUND] <= 0).any():
            return "some boxes are empty: right must exceed left, and bottom must exceed top"
        return out_of_range("labels are", labels_NM, num_classes)


def _box_masks(boxes_NM4: torch.Tensor, size: int) -> torch.Tensor:
    """Return masks (N, M, H, W) uint8 that are 1 inside the boxes."""
    left, top, right, bottom = (edge[..., None, None] for edge in boxes_NM4.unbind(2))
    at = torch.arange(size)
    x, y = at[None, None, None, :], at[None, None, :, None]
    return ((left <= x) & (x < right) & (top <= y) & (y < bottom)).to(torch.uint8)
