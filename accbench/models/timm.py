"""All of timm's models for images (Wightman, PyTorch Image Models): `timm:NAME`."""

import dataclasses
import importlib
import importlib.util
from typing import Any

import torch
from torch import nn

from accbench import extras
from accbench.errors import RequestError
from accbench.models import Classifier, ImageClassification, registered


@dataclasses.dataclass(frozen=True)
class _Classification(ImageClassification):
    def build(self, num_classes: int) -> nn.Module:
        """The model on the host, weights drawn from torch's global generator.

        Raises:
            RequestError: it does not take images of this size.
        """
        import timm

        name, size = self.name.partition(":")[2], self.image_size
        config: Any = timm.models.get_pretrained_cfg(name)
        made_for = config.input_size[-1]
        why = None if size == made_for else _problem(name, size)
        if why is not None and _problem(name, made_for) is None:
            raise RequestError(
                f"--model {self.name} does not take --image_size {size} ({why}); it was made for "
                f"{made_for}"
            )
        return Classifier(_create(name, size, num_classes), num_classes)


def _create(name: str, size: int, num_classes: int) -> nn.Module:
    import timm

    try:
        return timm.create_model(name, pretrained=False, num_classes=num_classes, img_size=size)
    except TypeError as error:  # it takes images of any size, or of one alone
        if "img_size" not in str(error):
            raise
    return timm.create_model(name, pretrained=False, num_classes=num_classes)


def _problem(name: str, size: int) -> str | None:
    """Why a model takes no images of so many pixels, if that is so.

    Tried on torch's meta device, whose tensors have shapes alone: neither does timm tell it nor
    does every model refuse it when it is made.
    """
    importlib.import_module("torch._dynamo")  # which does not import where meta is the default
    try:
        with torch.device("meta"):
            _create(name, size, 10)(torch.zeros(2, 3, size, size))
    except Exception as error:  # each model has its own
        return " ".join(str(error).split()) or type(error).__name__
    return None


class Family:
    """What timm registers."""

    prefixed = True
    names = ()

    @staticmethod
    def spec(name: str) -> ImageClassification:
        """Any of them, with random weights.

        Raises:
            RequestError: timm is not installed, or has no such model.
        """
        if importlib.util.find_spec("timm") is None:
            raise RequestError(
                f"--model timm:{name} needs timm, which is not installed: "
                + extras.install_command("models")
            )
        registered.check("timm", name, registered.names("timm", "models"))
        return _Classification(f"timm:{name}", nn.Identity)
