"""Networks of which a part, or all, leaves a compiler."""

import torch
from torch import nn

from benchmarks.nets import tied as tied
from benchmarks.nets import tiny


def leaves_the_compiler(num_classes: int) -> nn.Module:
    """Has a pooling that torch_xla 2.8.1 knows no XLA operation for."""
    net = tiny(num_classes)
    net.insert(3, nn.AdaptiveMaxPool2d(4))
    return net


def not_compiled(num_classes: int) -> nn.Module:
    """torch.compile leaves it to eager PyTorch."""
    net = tiny(num_classes)
    net.forward = torch.compiler.disable(net.forward)
    return net


class _DecidesByValue(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net = tiny(num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = self.net(images)
        return logits * 2 if float(logits.sum()) > 0 else logits


def decides_by_value(num_classes: int) -> nn.Module:
    """`tiny`, whose graph depends on what it computes."""
    return _DecidesByValue(num_classes)


class _Asks(nn.Module):
    """Decides by a value, for which the host must wait."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net = tiny(num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = self.net(images)
        if logits.max() > 100:  # the host asks
            logits = logits / 100
        return logits


class _NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, given):
        return given * 2

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("no way back from here")


class _Raising(nn.Module):
    """Its backward pass fails."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, num_classes, 4, stride=4)
        self.norm = nn.BatchNorm2d(num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.norm(_NoWayBack.apply(self.stem(images))).mean((2, 3))


def raising(num_classes: int) -> nn.Module:
    return _Raising(num_classes)


def asks_the_host(num_classes: int) -> nn.Module:
    return _Asks(num_classes)
