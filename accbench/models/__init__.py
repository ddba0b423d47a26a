"""The model contract: what trains, and by which loss.

`accbench/models/<family>.py` defines `class Family` with `names`, the models it
has, and `spec(name)`. Any other model is reached as `package.module:callable`.
"""

import dataclasses
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from accbench import plugins
from accbench.config import TaskConfig
from accbench.errors import RequestError

# Per channel, of images scaled to 0..1; the ImageNet values that torchvision documents.
_MEAN = (0.485, 0.456, 0.406)
_STD = (0.229, 0.224, 0.225)


class Classifier(nn.Module):
    """A network behind the normalisation of uint8 images.

    Bytes travel to the device and are normalised there: a quarter of the copy.
    """

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        scale = 1 / (255 * torch.tensor(_STD))
        self.register_buffer("scale", scale.view(1, 3, 1, 1), persistent=False)
        shift = -torch.tensor(_MEAN) / torch.tensor(_STD)
        self.register_buffer("shift", shift.view(1, 3, 1, 1), persistent=False)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        """uint8 (N, 3, H, W) to logits (N, num_classes)."""
        return self.net(images_NCHW.to(self.scale.dtype) * self.scale + self.shift)


@dataclasses.dataclass(frozen=True)
class ImageClassification:
    """Images (N, 3, H, W) uint8 and labels (N,) int64; cross-entropy."""

    mixes: ClassVar = True
    """Whether the loss takes weights of several classes in place of labels."""
    name: str
    build_net: Callable[..., nn.Module]
    """Called with num_classes; its module maps normalised images to logits."""
    label_smoothing: float = 0.0
    """Part of each label that the loss spreads over all classes."""

    def build(self, num_classes: int) -> nn.Module:
        """The model on the host, weights drawn from torch's global generator."""
        return Classifier(self.build_net(num_classes=num_classes))

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Mean over the batch, in float32 or in the model's own type where that is wider.

        Labels may be weights of all classes as well, (N, num_classes).
        """
        images_NCHW, labels = batch
        return self.loss_of_logits(model(images_NCHW), labels)

    def loss_of_logits(self, logits_NC: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Likewise."""
        logits_NC = logits_NC.to(torch.promote_types(logits_NC.dtype, torch.float32))
        if labels.is_floating_point():
            labels = labels.to(logits_NC.dtype)
        return functional.cross_entropy(logits_NC, labels, label_smoothing=self.label_smoothing)

    def score(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Sums over the samples whose label is not negative: loss, top-1, top-5, samples; (4,).

        Of a sample with several classes the one of the largest weight counts.
        """
        images_NCHW, labels_N = batch
        if labels_N.is_floating_point():
            labels_N = labels_N.argmax(dim=1)
        logits_NC = model(images_NCHW).float()
        valid_N = labels_N >= 0
        loss = functional.cross_entropy(logits_NC, labels_N, ignore_index=-1, reduction="sum")
        best_N5 = logits_NC.topk(min(5, logits_NC.shape[1]), dim=1).indices
        hits_N5 = (best_N5 == labels_N.unsqueeze(1)) & valid_N.unsqueeze(1)
        return torch.stack(
            [loss, hits_N5[:, 0].sum().float(), hits_N5.sum().float(), valid_N.sum().float()]
        )


def names() -> list[str]:
    """All models that families here and in installed packages have."""
    return sorted(n for family in plugins.classes("models").values() for n in family.names)


def of_task(task: TaskConfig) -> Any:
    """The task's model with the loss that its flags ask for.

    Raises:
        RequestError: there is no such model, or its loss knows no such thing.
    """
    spec = resolve(task.model, task.image_size)
    if task.label_smoothing and not hasattr(spec, "label_smoothing"):
        raise RequestError(f"--label_smoothing: the loss of --model {task.model} has none")
    if (task.mixup or task.cutmix) and not getattr(spec, "mixes", False):
        raise RequestError(
            f"--mixup and --cutmix mix labels, which the loss of --model {task.model} cannot take"
        )
    if task.label_smoothing:
        spec = dataclasses.replace(spec, label_smoothing=task.label_smoothing)
    return spec


def resolve(name: str, image_size: int) -> Any:
    """The model `name`, or `package.module:callable`, as a spec.

    Args:
        image_size: height and width in pixels, for models whose weights depend on it.

    Raises:
        RequestError: there is no such model; the message lists the right ones.
    """
    if ":" in name:
        return ImageClassification(name, _callable(name))
    for family in plugins.classes("models").values():
        if name in family.names:
            spec = family.spec(name)
            if hasattr(spec, "image_size"):
                spec = dataclasses.replace(spec, image_size=image_size)
            return spec
    known = ", ".join(names())
    raise RequestError(f"unknown model {name!r}; there are: {known}, or package.module:callable")


def _callable(name: str) -> Callable[..., nn.Module]:
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), attribute]):
        raise RequestError(f"--model {name} is not of the form package.module:callable")
    # As `python` has it for a script beside it, but last: a file there must not hide a
    # module that an installed package imports.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise RequestError(f"--model {name}: {error}") from None
    if not callable(found):
        raise RequestError(f"--model {name} is not callable")
    return found
