"""Mixup and CutMix of a batch on the host, by seed and sample alone.

The formulas are those of Zhang et al., mixup, 2018, and Yun et al., CutMix, 2019, each image
with its neighbour in the batch, as torchvision's `v2.MixUp` and `v2.CutMix` pair them. Those
draw from torch's one generator, which a loading thread must not take from: a model's dropout
on a CPU draws from it, too.
"""

import dataclasses
import math

import numpy as np
import torch
from torch.nn import functional

from accbench.config import TaskConfig


@dataclasses.dataclass(frozen=True)
class Mixing:
    """Mixes batches as `--mixup` and `--cutmix` say; at least one of them is not 0."""

    mixup: float
    cutmix: float
    num_classes: int
    seed: int

    def __call__(
        self, images_NHWC: torch.Tensor, labels_N: torch.Tensor, key: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 images, and for each the weights of its labels, (N, num_classes) float32.

        Args:
            key: which batch this is; the same one is mixed in the same way.
        """
        chance = np.random.default_rng((self.seed, key))
        both = bool(self.mixup and self.cutmix)
        others_NHWC = images_NHWC.roll(1, 0)
        if self.cutmix and (not both or chance.random() < 0.5):
            kept = chance.beta(self.cutmix, self.cutmix)
            top, bottom, left, right = _box(images_NHWC.shape[1:3], 1 - kept, chance)
            mixed = images_NHWC.clone()
            mixed[:, top:bottom, left:right] = others_NHWC[:, top:bottom, left:right]
            kept = 1 - (bottom - top) * (right - left) / math.prod(images_NHWC.shape[1:3])
        else:
            kept = chance.beta(self.mixup, self.mixup)
            blended = others_NHWC.float().lerp_(images_NHWC.float(), kept)
            mixed = blended.round_().to(torch.uint8)
        weights_NC = functional.one_hot(labels_N, self.num_classes).float()
        return mixed, weights_NC.roll(1, 0).lerp_(weights_NC, kept)


def _box(
    size_HW: torch.Size, area: float, chance: np.random.Generator
) -> tuple[int, int, int, int]:
    """(top, bottom, left, right) of about this part of the image, cut off at its edges."""
    edges = []
    for size in size_HW:
        middle, half = int(chance.integers(size)), int(0.5 * math.sqrt(area) * size)
        edges += [max(middle - half, 0), min(middle + half, size)]
    return edges[0], edges[1], edges[2], edges[3]


def of_task(task: TaskConfig, num_classes: int) -> Mixing | None:
    """What the task asks for; None if it asks for neither."""
    if not task.mixup and not task.cutmix:
        return None
    return Mixing(task.mixup, task.cutmix, num_classes, task.seed)
