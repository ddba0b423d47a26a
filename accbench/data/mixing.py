"""Mixup and CutMix of a batch on the host, determined by seed and sample alone.

The formulas are those of Zhang et al., mixup, 2018, and Yun et al., CutMix, 2019. Each image is
mixed with its neighbour in the batch, as in torchvision's `v2.MixUp` and `v2.CutMix`. Those draw
from torch's global generator, which a loading thread must not use: a model's dropout on a CPU draws
from it, too.
"""

import dataclasses
import math

import numpy as np
import torch
from torch.nn import functional

from accbench.config import TaskConfig


@dataclasses.dataclass(frozen=True)
class Mixing:
    """A function that mixes batches as `--mixup` and `--cutmix` say; at least one is not 0."""

    mixup: float
    cutmix: float
    num_classes: int
    seed: int

    def __call__(
        self, images_NHWC: torch.Tensor, labels_N: torch.Tensor, key: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mix uint8 images, and return them with their label weights, (N, num_classes) float32.

        Args:
            images_NHWC: the batch's images.
            labels_N: their labels.
            key: identifies the batch, which is always mixed in the same way.
        """
        generator = np.random.default_rng((self.seed, key))
        both = bool(self.mixup and self.cutmix)
        others_NHWC = images_NHWC.roll(1, 0)
        if self.cutmix and (not both or generator.random() < 0.5):
            share = generator.beta(self.cutmix, self.cutmix)
            top, bottom, left, right = _box(images_NHWC.shape[1:3], 1 - share, generator)
            mixed = images_NHWC.clone()
            mixed[:, top:bottom, left:right] = others_NHWC[:, top:bottom, left:right]
            share = 1 - (bottom - top) * (right - left) / math.prod(images_NHWC.shape[1:3])
        else:
            share = generator.beta(self.mixup, self.mixup)
            blended = others_NHWC.float().lerp_(images_NHWC.float(), share)
            mixed = blended.round_().to(torch.uint8)
        weights_NC = functional.one_hot(labels_N, self.num_classes).float()
        return mixed, weights_NC.roll(1, 0).lerp_(weights_NC, share)


def _box(
    size_HW: torch.Size, area: float, generator: np.random.Generator
) -> tuple[int, int, int, int]:
    """Draw (top, bottom, left, right) of a box of about this fraction of the image.

    The box is cut off at the image's edges.
    """
    edges = []
    for size in size_HW:
        middle, half = int(generator.integers(size)), int(0.5 * math.sqrt(area) * size)
        edges += [max(middle - half, 0), min(middle + half, size)]
    return edges[0], edges[1], edges[2], edges[3]


def of_task(task: TaskConfig, num_classes: int) -> Mixing | None:
    """Return the mixing that the task asks for; None if it asks for none."""
    if not task.mixup and not task.cutmix:
        return None
    return Mixing(task.mixup, task.cutmix, num_classes, task.seed)
