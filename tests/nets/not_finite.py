"""Networks whose losses or gradients are not finite."""

import os

import torch
from torch import nn

from benchmarks.nets import tied as tied
from benchmarks.nets import tiny


class _NotANumber(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net = tiny(num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.net(images) * float("nan")


def not_a_number(num_classes: int) -> nn.Module:
    return _NotANumber(num_classes)


class _WrongAt(nn.Module):
    """`tiny`, whose logits on the last rank are not finite in the forward passes WRONG_AT names."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net, self.calls = tiny(num_classes), 0
        is_last = int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1
        self.wrong = os.environ["WRONG_AT"].split(",") if is_last else []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        is_wrong = self.training and ("all" in self.wrong or str(self.calls) in self.wrong)
        return self.net(images) * (float("inf") if is_wrong else 1.0)


def wrong_at(num_classes: int) -> nn.Module:
    return _WrongAt(num_classes)


class _WrongOnWhite(nn.Module):
    """`tiny`, whose logits are not finite in training where an image is white all over."""

    def __init__(self, num_classes: int, has_gradient: bool) -> None:
        super().__init__()
        self.net, self.has_gradient = tiny(num_classes), has_gradient

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        is_white = (images.amin(dim=(1, 2, 3)) > 2.0).unsqueeze(1) & self.training
        if self.has_gradient:
            return self.net(images) * torch.where(is_white, float("inf"), 1.0)
        return self.net(images).masked_fill(is_white, float("inf"))


def wrong_on_white(num_classes: int) -> nn.Module:
    return _WrongOnWhite(num_classes, has_gradient=True)


def wrong_loss_on_white(num_classes: int) -> nn.Module:
    return _WrongOnWhite(num_classes, has_gradient=False)


class _Infinite(torch.autograd.Function):
    """The values as they are, gradients beyond every type."""

    @staticmethod
    def forward(context, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(context, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("inf")


class _Overflowing(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return _Infinite.apply(values)


def overflowing(num_classes: int) -> nn.Module:
    """Its loss is fine, and its gradients never are."""
    net = tiny(num_classes)
    net.append(_Overflowing())
    return net
