"""All of timm's models for images (Wightman, PyTorch Image Models): `timm:NAME`."""

import dataclasses
import importlib.util
from typing import Any

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
        options: dict[str, Any] = {"pretrained": False, "num_classes": num_classes}
        try:
            net = timm.create_model(name, img_size=size, **options)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            wanted = config.input_size[-1]
            if config.fixed_input_size and size != wanted:
                raise RequestError(
                    f"--model {self.name} takes images of {wanted} pixels alone; give --image_size "
                    f"{wanted}"
                ) from None
            net = timm.create_model(name, **options)
        except (AssertionError, ValueError, RuntimeError) as error:
            why = " ".join(str(error).split()) or "it can't be built for it"
            raise RequestError(
                f"--model {self.name} does not take --image_size {size} ({why}); it was made for "
                f"{config.input_size[-1]}"
            ) from error
        return Classifier(net, num_classes)


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
