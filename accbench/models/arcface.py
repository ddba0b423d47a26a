"""Face recognition: residual networks for aligned faces, trained by ArcFace.

Network and loss follow Deng et al., ArcFace: Additive Angular Margin Loss for Deep Face
Recognition, 2019: the network of section 3.1 (units of BN-Conv-BN-PReLU-Conv-BN, a first layer
that keeps the 112 x 112 pixels, an embedding of 512 after BN-Dropout-FC-BN), and the loss of
section 2.2.
"""

import dataclasses
import math
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from accbench.config.field import flag
from accbench.distributed.collectives import RankGroup
from accbench.distributed.tensor_slices import PaddedRows, TensorSlice
from accbench.errors import RequestError
from accbench.models import Classifier, ImageClassification, partial_fc
from accbench.models.partial_fc import ClassHead
from accbench.models.tasks.classification import Normalized

EMBEDDING_SIZE = 512
MARGIN, SCALE = 0.5, 64.0  # the margin in radians, and the logits' factor
_WIDTHS = (64, 128, 256, 512)
# name -> units of each stage
_UNITS = {"arcface_r18": (2, 2, 2, 2), "arcface_r50": (3, 4, 14, 3), "arcface_r100": (3, 13, 30, 3)}


class _ResidualUnit(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.way = nn.Sequential(  # the residual branch; checkpoints have this name
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
    """A network that maps images (N, 3, H, W) to cosines (N, num_classes).

    Each cosine is that of the angle between an image's embedding and a class's weight vector.

    Args:
        units: residual units in each of the four stages.
        image_size: H and W; each of the four stages halves them.
        num_classes: number of classes.
        sample_rate: for PartialFC, the fraction of them that a training step computes with.
    """

    def __init__(
        self, units: tuple[int, ...], image_size: int, num_classes: int, sample_rate: float = 1.0
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, _WIDTHS[0], 3, padding=1, bias=False),
            nn.BatchNorm2d(_WIDTHS[0]),
            nn.PReLU(_WIDTHS[0]),
        ]
        width_in, side = _WIDTHS[0], image_size
        for width, num_units in zip(_WIDTHS, units, strict=True):
            layers += [_ResidualUnit(width_in, width, 2)]
            layers += [_ResidualUnit(width, width, 1) for _ in range(num_units - 1)]
            width_in, side = width, (side + 1) // 2
        self.trunk = nn.Sequential(*layers, nn.BatchNorm2d(width_in))
        self.embed = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(0.4),
            nn.Linear(width_in * side * side, EMBEDDING_SIZE),
            nn.BatchNorm1d(EMBEDDING_SIZE),
        )
        self.classes = nn.Parameter(torch.randn(num_classes, EMBEDDING_SIZE) * 0.01)
        self.head = ClassHead(num_classes, sample_rate)

    def shard_classes(self, group: RankGroup) -> tuple[str, TensorSlice]:
        """Keep a part of the classes, and return the parameter's name and the part.

        From then on `forward` needs labels.
        """
        part = PaddedRows(tuple(self.classes.shape), 0, group.rank, group.size)
        own = part.cut(self.classes.detach()).clone()
        self.classes = nn.Parameter(own, self.classes.requires_grad)
        self.head = dataclasses.replace(self.head, group=group)
        return "classes", part

    def forward(
        self, images_NCHW: torch.Tensor, labels_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return cosines, (N, num_classes); with labels the loss (), or in evaluation sums, (4,).

        Both are as `partial_fc` has them.
        """
        embeddings_NE = functional.normalize(self.embed(self.trunk(images_NCHW)))
        if labels_N is None:
            return functional.linear(embeddings_NE, functional.normalize(self.classes))
        of_batch = (embeddings_NE, labels_N, self.classes, self.head)
        if self.training:
            return partial_fc.mean_loss(*of_batch, with_margin, SCALE)
        return partial_fc.sums(*of_batch, SCALE)


def with_margin(cosines: torch.Tensor) -> torch.Tensor:
    """Return the cosines of angles that are larger by `MARGIN`."""
    # The derivative of a square root is infinite at 0.
    sines = (1 - cosines.square()).clamp(min=1e-9).sqrt()
    widened = cosines * math.cos(MARGIN) - sines * math.sin(MARGIN)
    # Past 180 degrees the cosine would grow again, so the loss goes on as a straight line.
    linear = cosines - math.sin(math.pi - MARGIN) * MARGIN
    return torch.where(cosines > math.cos(math.pi - MARGIN), widened, linear)


class FaceClassifier(Classifier):
    """A `FaceNet` that first normalises its uint8 images, and may be called with labels."""

    def forward(self, images_NCHW: torch.Tensor, *labels: torch.Tensor) -> Any:
        """Return what `FaceNet` does."""
        if not labels:
            return super().forward(images_NCHW)
        return Normalized.forward(self, images_NCHW, *labels)


@dataclasses.dataclass(frozen=True)
class ArcFace(ImageClassification):
    """Face images (N, 3, H, W) uint8 with identity labels (N,) int64, and the ArcFace loss."""

    mixes: ClassVar = False
    image_size: int = 112
    sample_rate: float | None = None
    """Fraction of classes that a training step computes with, for PartialFC; None: the plain
    loss, for which each rank has all classes."""

    def build(self, num_classes: int) -> nn.Module:
        return self.build_of(_UNITS[self.name], num_classes)

    def build_of(self, units: tuple[int, ...], num_classes: int) -> nn.Module:
        """Build a network of so many units in each stage."""
        rate = 1.0 if self.sample_rate is None else self.sample_rate
        return FaceClassifier(FaceNet(units, self.image_size, num_classes, rate), num_classes)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if self.sample_rate is None:
            return super().loss(model, batch)
        if self.label_smoothing:
            raise RequestError(
                "--label_smoothing spreads labels over all classes, which --arcface.sample_rate "
                "does not compute with; leave one of them out"
            )
        loss: torch.Tensor = model(*batch)
        return loss

    def loss_of_logits(self, logits_NC: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Compute the cross-entropy after adding `MARGIN` to the angle of the label's class."""
        cosines_NC = logits_NC.to(torch.promote_types(logits_NC.dtype, torch.float32))
        with_margin_N1 = with_margin(cosines_NC.gather(1, labels.unsqueeze(1)))
        is_label_NC = functional.one_hot(labels, cosines_NC.shape[1]).bool()
        with_margin_NC = torch.where(is_label_NC, with_margin_N1, cosines_NC)
        return super().loss_of_logits(SCALE * with_margin_NC, labels)

    def score(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the sums that `ImageClassification.score` returns, without the margin."""
        if self.sample_rate is None:
            return super().score(_ScaledLogits(model), batch)
        sums: torch.Tensor = model(*batch)
        return sums


class _ScaledLogits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        cosines_NC: torch.Tensor = self.model(images_NCHW)
        return SCALE * cosines_NC


class Family:
    """The models arcface_r18, arcface_r50 and arcface_r100, named by depth as in the paper."""

    names = tuple(_UNITS)

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Options of the models arcface_r18, arcface_r50 and arcface_r100."""

        sample_rate: float | None = flag(
            None,
            "PartialFC: shard the classes' vectors over the workers, and compute in a step with "
            "this fraction of each one's, those of the batch's labels included. 1: with all. "
            "Unset: each worker has all of them.",
            minimum=0,
            maximum=1,
        )

    @staticmethod
    def spec(name: str) -> ImageClassification:
        """Return the spec of a model in `names`, which builds it with random weights."""
        return ArcFace(name, nn.Identity)
