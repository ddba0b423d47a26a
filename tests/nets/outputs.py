"""Networks that return, or take, something else than scores of a batch."""

import torch
from torch import nn

from benchmarks.nets import tied as tied
from benchmarks.nets import tiny


class _Returns(nn.Module):
    """`tiny`, whose logits come in another form."""

    def __init__(self, num_classes: int, form) -> None:
        super().__init__()
        self.net, self.form = tiny(num_classes), form

    def forward(self, images: torch.Tensor):
        return self.form(self.net(images))


def returns_dict(num_classes: int) -> nn.Module:
    return _Returns(num_classes, lambda logits: {"features": logits[:, :1], "logits": logits})


def returns_tuple(num_classes: int) -> nn.Module:
    return _Returns(num_classes, lambda logits: (logits, logits.sum()))


def returns_words(num_classes: int) -> nn.Module:
    return _Returns(num_classes, lambda logits: "logits")


def takes_nothing() -> nn.Module:
    """Has ten classes, whatever is asked for."""
    return tiny(10)


def no_module(num_classes: int):
    return tiny  # which should have been called
