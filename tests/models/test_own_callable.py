"""What `--model package.module:attribute` may name; what it may not is told in one line."""

import pytest
import torch
from torch import nn

from accbench import models
from accbench.config import TaskConfig
from accbench.distributed.process_group import Topology
from accbench.engines import ddp
from accbench.errors import RequestError

HERE = "tests.models.test_own_callable"


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(3)

    def forward(self, images: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        scores: torch.Tensor = self.head(images.flatten(1) * scale)
        return scores


class OfTwo(Flat):
    def forward(self, images: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        return super().forward(images * masks)


def of_width(num_classes: int, width: int) -> nn.Module:
    return nn.Linear(width, num_classes)


built = nn.Flatten()


def test_a_class_with_arguments_that_have_defaults_is_built():
    assert isinstance(models.resolve(f"{HERE}:Flat", 8).build(3).net, Flat)


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ("of_width", "wants width, and is called with num_classes alone"),
        ("built", "is a network that was built already; name its class"),
        ("OfTwo", "its forward wants images, masks; a spec of your own says"),
        ("HERE", "is neither callable nor a spec"),
        ("dict", f"module '{HERE}' has no attribute 'dict'"),
    ],
)
def test_what_cannot_be_trained_is_refused(attribute, words):
    with pytest.raises(RequestError) as caught:
        models.resolve(f"{HERE}:{attribute}", 8).build(3)
    assert words in str(caught.value)
    assert f"--model {HERE}:{attribute}" in str(caught.value)


def test_a_network_in_which_nothing_trains_is_refused():
    engine = ddp.Engine(TaskConfig(device="cpu"), ddp.Engine.Options(), Topology())
    for net in (nn.Flatten(), nn.Linear(2, 2).requires_grad_(False)):
        with pytest.raises(RequestError, match="has no parameter that trains"):
            engine.prepared(net)
