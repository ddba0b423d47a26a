"""All image models of timm (Wightman, PyTorch Image Models): `timm:NAME`."""

import dataclasses
import importlib
import importlib.util
from typing import Any

import torch
from torch import nn

from accbench.errors import RequestError
from accbench.models import Classifier, ImageClassification
from accbench.models.tasks import registered
from accbench.system import extras


@dataclasses.dataclass(frozen=True)
class _TimmClassification(ImageClassification):
    def build(self, num_classes: int) -> nn.Module:
        """Build the model on the host, with weights drawn from torch's global generator.

        Raises:
            RequestError: the model does not accept images of this size.
        """
        import timm

        name, size = self.name.partition(":")[2], self.image_size
        config: Any = timm.models.get_pretrained_cfg(name)
        native_size = config.input_size[-1]
        why = None if size == native_size else _size_problem(name, size)
        if why is not None and _size_problem(name, native_size) is None:
            raise RequestError(
                f"--model {self.name} does not take --image_size {size} ({why}); it was made for "
                f"{native_size}"
            )
        return Classifier(_create(name, size, num_classes), num_classes)


def _create(name: str, size: int, num_classes: int) -> nn.Module:
    import timm

    try:
        return timm.create_model(name, pretrained=False, num_classes=num_classes, img_size=size)
    except TypeError as error:  # the model accepts images of any size, or of one size alone
        if "img_size" not in str(error):
            raise
    return timm.create_model(name, pretrained=False, num_classes=num_classes)


def _size_problem(name: str, size: int) -> str | None:
    """Return why a model does not accept images of `size` pixels; None if it does.

    The model runs on torch's meta device, whose tensors have only shapes: timm does not document
    the accepted sizes, and not every model checks them when it is built.
    """
    importlib.import_module("torch._dynamo")  # cannot be imported where meta is the default device
    try:
        with torch.device("meta"):
            _create(name, size, 10)(torch.zeros(2, 3, size, size))
    except Exception as error:  # each model raises its own
        return " ".join(str(error).split()) or type(error).__name__
    return None


class Family:
    """All models that timm registers."""

    prefixed = True
    names = ()

    @staticmethod
    def spec(name: str) -> ImageClassification:
        """Return the spec of any timm model, which builds it with random weights.

        Raises:
            RequestError: timm is not installed, or does not have the model.
        """
        if importlib.util.find_spec("timm") is None:
            raise RequestError(
                f"--model timm:{name} needs timm, which is not installed: "
                + extras.install_command("models")
            )
        registered.check("timm", name, registered.names("timm", "models"))
        return _TimmClassification(f"timm:{name}", nn.Identity)
