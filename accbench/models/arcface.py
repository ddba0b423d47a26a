"""Face recognition: residual networks for aligned faces, trained by ArcFace.

Both are of Deng et al., ArcFace: Additive Angular Margin Loss for Deep Face Recognition, 2019:
the network of section 3.1 (units of BN-Conv-BN-PReLU-Conv-BN, a first layer that keeps the
112 x 112 pixels, an embedding of 512 behind BN-Dropout-FC-BN), the loss of section 2.2.
"""

import dataclasses
import math
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from accbench.models import Classifier, ImageClassification

EMBEDDING_SIZE = 512
MARGIN, SCALE = 0.5, 64.0  # the angle in radians, and the logits' factor
_WIDTHS = (64, 128, 256, 512)
# name -> units of each stage
_UNITS = {"arcface_r18": (2, 2, 2, 2), "arcface_r50": (3, 4, 14, 3), "arcface_r100": (3, 13, 30, 3)}


class _Unit(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.way = nn.Sequential(
            nn.BatchNorm2d(width_in),
            nn.Conv2d(width_in, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.PReLU(width),
            nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or width_in != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(width_in, width, 1, stride=stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        y_NCHW: torch.Tensor = self.way(x_NCHW) + self.shortcut(x_NCHW)
        return y_NCHW


class FaceNet(nn.Module):
    """Images (N, 3, H, W) to cosines (N, num_classes) of their embeddings and the classes'.

    Args:
        image_size: H and W; each of four stages halves them.
    """

    def __init__(self, units: tuple[int, ...], image_size: int, num_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, _WIDTHS[0], 3, padding=1, bias=False),
            nn.BatchNorm2d(_WIDTHS[0]),
            nn.PReLU(_WIDTHS[0]),
        ]
        width_in, side = _WIDTHS[0], image_size
        for width, num_units in zip(_WIDTHS, units, strict=True):
            layers += [_Unit(width_in, width, 2)]
            layers += [_Unit(width, width, 1) for _ in range(num_units - 1)]
            width_in, side = width, (side + 1) // 2
        self.trunk = nn.Sequential(*layers, nn.BatchNorm2d(width_in))
        self.embed = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(0.4),
            nn.Linear(width_in * side * side, EMBEDDING_SIZE),
            nn.BatchNorm1d(EMBEDDING_SIZE),
        )
        self.classes = nn.Parameter(torch.randn(num_classes, EMBEDDING_SIZE) * 0.01)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        embeddings_NE = functional.normalize(self.embed(self.trunk(images_NCHW)))
        return functional.linear(embeddings_NE, functional.normalize(self.classes))


@dataclasses.dataclass(frozen=True)
class ArcFace(ImageClassification):
    """Faces (N, 3, H, W) uint8 and the persons' numbers (N,) int64; an angular margin."""

    mixes: ClassVar = False
    image_size: int = 112

    def build(self, num_classes: int) -> nn.Module:
        return Classifier(FaceNet(_UNITS[self.name], self.image_size, num_classes), num_classes)

    def loss_of_logits(self, logits_NC: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Cross-entropy where the angle to the right class is made larger by `MARGIN`."""
        cosines_NC = logits_NC.to(torch.promote_types(logits_NC.dtype, torch.float32))
        right_N1 = cosines_NC.gather(1, labels.unsqueeze(1))
        # The derivative of a square root has no end at 0.
        sines_N1 = (1 - right_N1.square()).clamp(min=1e-9).sqrt()
        further_N1 = right_N1 * math.cos(MARGIN) - sines_N1 * math.sin(MARGIN)
        # Where the angle would pass 180 degrees its cosine would grow again.
        straight_N1 = right_N1 - math.sin(math.pi - MARGIN) * MARGIN
        further_N1 = torch.where(right_N1 > math.cos(math.pi - MARGIN), further_N1, straight_N1)
        is_right_NC = functional.one_hot(labels, cosines_NC.shape[1]).bool()
        with_margin_NC = torch.where(is_right_NC, further_N1, cosines_NC)
        return super().loss_of_logits(SCALE * with_margin_NC, labels)

    def score(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """As for any classes, without the margin."""
        return super().score(_Scaled(model), batch)


class _Scaled(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        cosines_NC: torch.Tensor = self.model(images_NCHW)
        return SCALE * cosines_NC


class Family:
    """arcface_r18, arcface_r50 and arcface_r100, named by their layers as in the paper."""

    names = tuple(_UNITS)

    @staticmethod
    def spec(name: str) -> ImageClassification:
        """One of `names`, with random weights."""
        return ArcFace(name, nn.Identity)
