"""Networks whose parameters and buffers are tied, unused, checkpointed or otherwise unusual."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from accbench.models.arcface import ArcFace, FaceClassifier, FaceNet
from accbench.models.vit import PIPELINE_PLAN, SEQUENCE_PARALLEL_PLAN, TENSOR_PARALLEL_PLAN
from benchmarks.nets import tied as tied
from benchmarks.nets import tiny


def of_two_buckets(num_classes: int) -> nn.Module:
    """Have gradients of more than DDP's first bucket of 1 MiB, in two layers."""
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(16), nn.Flatten(), nn.Linear(768, 512), nn.ReLU(),
        nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, num_classes),
    )  # fmt: skip


class _Versioned(nn.Sequential):
    """Wants to know of which version what it loads is."""

    _version = 2

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *others: Any
    ) -> None:
        if local_metadata.get("version") not in (1, 2):
            raise ValueError("version should be 1 or 2")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)


def versioned(num_classes: int) -> nn.Module:
    return _Versioned(*tiny(num_classes))


def wide(num_classes: int) -> nn.Module:
    """Likewise, most of it in large parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, stride=2, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 1024),
        nn.ReLU(),
        nn.Linear(1024, num_classes),
    )


class _Merging(nn.Sequential):
    """Evaluates with other weights, as a model does that merges LoRA's into its own."""

    is_merged = False

    def train(self, mode: bool = True) -> "_Merging":
        if mode == self.is_merged:
            self.is_merged = not mode
            with torch.no_grad():
                self[-1].weight.mul_(1 / 4 if mode else 4)
        return super().train(mode)


def merging(num_classes: int) -> nn.Module:
    """`wide`, which writes to a large parameter in `eval()`."""
    return _Merging(*wide(num_classes))


def huge(num_classes: int) -> nn.Module:
    """A quarter of a billion weights in two products, which can be cut (`--tp`)."""
    net = nn.Sequential(
        nn.Conv2d(3, 1, 3), nn.AdaptiveAvgPool2d(32), nn.Flatten(), nn.Linear(1024, 2**17),
        nn.ReLU(), nn.Linear(2**17, 1024), nn.Linear(1024, num_classes),
    )  # fmt: skip
    net.tensor_parallel_plan = {"3": "colwise", "5": "rowwise"}  # type: ignore[assignment]
    return net


def sevenths(num_classes: int) -> nn.Module:
    """BatchNorm, in blocks of seven channels, which four workers cannot share evenly."""

    def block(num_in: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(num_in, 7, 3, stride=2), nn.BatchNorm2d(7), nn.ReLU())

    head = nn.Sequential(nn.Flatten(), nn.Linear(7 * 3 * 3, num_classes))
    return nn.Sequential(block(3), block(7), head)


def shallow_vit(num_classes: int) -> nn.Module:
    """vit_ti_16 with two layers of its twelve, for images of 32 pixels."""
    from torchvision.models.vision_transformer import VisionTransformer

    return VisionTransformer(32, 16, 2, 3, 192, 4 * 192, num_classes=num_classes)


def small_vit(num_classes: int) -> nn.Module:
    """A vision transformer with four heads, for images of 16 pixels, and vit_ti_16's plan."""
    from torchvision.models.vision_transformer import VisionTransformer

    net = VisionTransformer(16, 8, 2, 4, 32, 64, num_classes=num_classes)
    net.tensor_parallel_plan = TENSOR_PARALLEL_PLAN  # type: ignore[assignment]
    net.pipeline_plan = PIPELINE_PLAN  # type: ignore[assignment]
    nn.init.normal_(net.heads.head.weight, std=0.02)  # which begins with zeros
    return net


class _Staged(nn.Module):
    """Four blocks with BatchNorm between a stem, with BatchNorm, and a head."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.GELU())
            for _ in range(4)
        )
        self.head = nn.Linear(6, num_classes)
        self.pipeline_plan = ["stem", "norm", "layers.*", "head"]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.stem(images))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden.mean((2, 3)))


def even_vit(num_classes: int) -> nn.Module:
    """`small_vit` for images of 24 pixels, which makes ten tokens."""
    from torchvision.models.vision_transformer import VisionTransformer

    net = VisionTransformer(24, 8, 2, 4, 32, 64, dropout=0.1, num_classes=num_classes)
    net.tensor_parallel_plan = TENSOR_PARALLEL_PLAN  # type: ignore[assignment]
    net.sequence_parallel_plan = SEQUENCE_PARALLEL_PLAN  # type: ignore[assignment]
    nn.init.normal_(net.heads.head.weight, std=0.02)  # which begins with zeros
    return net


def staged(num_classes: int) -> nn.Module:
    return _Staged(num_classes)


@dataclasses.dataclass(frozen=True)
class ShallowFace(ArcFace):
    """arcface_r18 with a unit a stage."""

    name: str = "tests.nets:ShallowFace"
    build_net: Callable[..., nn.Module] = nn.Identity

    def build(self, num_classes: int) -> nn.Module:
        return self.build_of((1, 1, 1, 1), num_classes)


class _TinyFaceNet(FaceNet):
    """A `FaceNet` of one convolution, for images of 16 pixels."""

    def __init__(self, num_classes: int, sample_rate: float) -> None:
        super().__init__((1, 1, 1, 1), 16, num_classes, sample_rate)
        self.trunk = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.GroupNorm(2, 8))
        self.embed = nn.Sequential(nn.Flatten(), nn.Linear(128, 512))


@dataclasses.dataclass(frozen=True)
class TinyFace(ShallowFace):
    """ArcFace's loss and head behind one convolution."""

    name: str = "tests.nets:TinyFace"
    image_size: int = 16

    def build(self, num_classes: int) -> nn.Module:
        rate = 1.0 if self.sample_rate is None else self.sample_rate
        return FaceClassifier(_TinyFaceNet(num_classes, rate), num_classes)


@dataclasses.dataclass(frozen=True)
class PartialFace(TinyFace):
    """`TinyFace` with PartialFC."""

    sample_rate: float | None = 1.0


def frozen_first(num_classes: int) -> nn.Module:
    """`tiny`, whose convolution is not trained."""
    net = tiny(num_classes)
    net[0].requires_grad_(False)
    return net


class _Unused(nn.Module):
    """`tiny` with a layer that no sample passes."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net, self.spare = tiny(num_classes), nn.Linear(4, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.net(images)


def unused(num_classes: int) -> nn.Module:
    return _Unused(num_classes)


class _Checkpointed(nn.Module):
    """Two blocks, computed again in the backward pass; the second with dropout."""

    def __init__(self, num_classes: int, reentrant: bool, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GELU(), nn.Dropout(p))
            for p in (0.0, dropout)
        )
        self.head, self.reentrant = nn.Linear(16, num_classes), reentrant

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=self.reentrant)
        return self.head(hidden.mean((2, 3)))


def checkpointed(num_classes: int) -> nn.Module:
    return _Checkpointed(num_classes, reentrant=False, dropout=0.0)


def checkpointed_reentrant(num_classes: int) -> nn.Module:
    return _Checkpointed(num_classes, reentrant=True, dropout=0.0)


def checkpointed_dropping(num_classes: int) -> nn.Module:
    return _Checkpointed(num_classes, reentrant=False, dropout=0.3)


def cumulative(num_classes: int) -> nn.Module:
    """`tiny`, whose BatchNorm averages over all batches."""
    net = tiny(num_classes)
    net[1].momentum = None
    return net


class _Keeps(nn.Module):
    """`tiny` with a tensor that is no buffer, a buffer that others take the place of, and large
    integers."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net, self.table = tiny(num_classes), torch.linspace(0.5, 1.5, num_classes)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + len(images)
        images.mul_(0.5)
        large = torch.arange(images.shape[-1]) * 0x7FEB352D  # beyond 32 bits
        return self.net(images + (large >> 30 & 0xF) / 64) * self.table


def keeps(num_classes: int) -> nn.Module:
    return _Keeps(num_classes)


class _Masks(nn.Module):
    """Picks pixels by their value: how many is known when they are there. And weighs rows by their
    places, of which torch_xla gives another last row while a dispatch mode looks on."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net = tiny(num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        bright = images[images > 0.5]
        height, width = images.shape[2:]
        rows = torch.arange(1, height + 1, device=images.device).to(images.dtype)
        rows_1HW = rows.unsqueeze(1).repeat(1, 1, width)
        return self.net(images * rows_1HW / rows_1HW[:, -1:, :]) + bright.mean()


def masks(num_classes: int) -> nn.Module:
    return _Masks(num_classes)


class _Tabled(nn.Module):
    """Makes a table when it first sees a size, in the place of a buffer."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, num_classes, 4, stride=4, bias=False)
        self.norm = nn.BatchNorm2d(num_classes)
        self.register_buffer("table", torch.zeros(1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.stem(images)).flatten(2)
        if self.table.shape[0] != hidden.shape[2]:
            self.table = torch.linspace(0.5, 2, hidden.shape[2]).to(hidden)
        return (hidden * self.table).mean(2)


def tabled(num_classes: int) -> nn.Module:
    return _Tabled(num_classes)


class _Ranged(nn.Module):
    """Brings all that it sees between 0 and 1, by the least and the largest of all."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, num_classes, 4, stride=4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(images)
        return ((hidden - hidden.amin()) / (hidden.amax() - hidden.amin())).mean((2, 3))


def ranged(num_classes: int) -> nn.Module:
    return _Ranged(num_classes)


class _TiedDeep(nn.Module):
    """A weight in three places: by assignment, in a list of parameters, and registered again."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, num_classes, 4, stride=4)
        self.one = nn.Linear(num_classes, num_classes)
        self.two = nn.Linear(num_classes, num_classes, bias=False)
        self.two.weight = self.one.weight
        self.others = nn.ParameterList([self.one.weight, nn.Parameter(torch.ones(num_classes))])
        self.register_parameter("alias", self.one.weight)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.one(self.stem(images).mean((2, 3))))
        return self.two(hidden) @ self.others[0].t() * self.others[1]


def tied_deep(num_classes: int) -> nn.Module:
    return _TiedDeep(num_classes)


def tied_buffers(num_classes: int) -> nn.Module:
    """Two BatchNorms that count in the same tensors."""
    net = tiny(num_classes)
    net.insert(3, nn.Conv2d(16, 16, 1, bias=False))
    net.insert(4, nn.BatchNorm2d(16))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        net[4]._buffers[name] = net[1]._buffers[name]
    return net


def shared_memory(num_classes: int) -> nn.Module:
    """Two parameters that are views of one memory."""
    net = tiny(num_classes)
    net.append(nn.Linear(num_classes, num_classes, bias=False))
    net.append(nn.Linear(num_classes, num_classes, bias=False))
    net[-1].weight = nn.Parameter(net[-2].weight.detach())
    return net


class _Blocks(nn.Module):
    """A stem, two blocks and a head."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, stride=4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GELU()) for _ in range(2)
        )
        self.head = nn.Linear(8, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden.mean((2, 3)))


def computed_again(num_classes: int) -> nn.Module:
    """For `--checkpoint_modules Sequential`."""
    return _Blocks(num_classes)


class _Joined(nn.Module):
    """As PyTorch's tutorials end their convolutions: channels and pixels joined by `view`."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8 * 7 * 7, num_classes)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        found = self.image(images_NCHW)
        scores: torch.Tensor = self.head(found.view(len(found), -1))
        return scores


def joined(num_classes: int) -> nn.Module:
    """Of images of 16 pixels."""
    return _Joined(num_classes)


def sparse(num_classes: int) -> nn.Module:
    """Has gradients that are sparse."""
    net = tiny(num_classes)
    net.append(nn.Sequential(nn.Embedding(4, 2, sparse=True)))
    return net
