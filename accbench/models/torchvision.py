"""All classification, segmentation and detection models of torchvision: `torchvision:NAME`."""

import dataclasses
from typing import Any

from torch import nn

from accbench.errors import RequestError
from accbench.models import Classifier, ImageClassification
from accbench.models.tasks import detection, registered
from accbench.models.tasks.detection import Detection
from accbench.models.tasks.segmentation import Segmentation
from accbench.models.tasks.spec import Spec

# Weights of the auxiliary classifiers' losses: GoogLeNet's from Szegedy et al., Going Deeper with
# Convolutions, 2014, section 5, and Inception v3's from torchvision's reference training.
_AUXILIARY_WEIGHTS = {"googlenet": 0.3, "inception_v3": 0.4}
# Pixels that the auxiliary classifier needs; torchvision's `min_size` ignores it.
_MIN_SIZE = {"inception_v3": 299}
# Models whose weights depend on the image size, and the number that divides it.
_MULTIPLES = {
    "vit_b_16": 16, "vit_b_32": 32, "vit_l_16": 16, "vit_l_32": 32, "vit_h_14": 14, "maxvit_t": 224,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _TorchvisionClassification(ImageClassification):
    auxiliary_weight: float = 0.0

    def __post_init__(self) -> None:
        multiple = _MULTIPLES.get(self._builder_name, 1)
        if self.image_size % multiple:
            raise RequestError(
                f"--model {self.name} needs an --image_size that is a multiple of {multiple}, not "
                f"{self.image_size}"
            )

    @property
    def _builder_name(self) -> str:
        return self.name.partition(":")[2]

    def build(self, num_classes: int) -> nn.Module:
        """Build the model on the host, with weights drawn from torch's global generator.

        Raises:
            RequestError: the images are too small for the model.
        """
        from torchvision import models

        name, options = self._builder_name, dict[str, Any]()
        if name in _MULTIPLES:
            size = self.image_size
            options = {"image_size": size} if name != "maxvit_t" else {"input_size": (size, size)}
        elif not name.startswith("swin"):  # which pads its windows
            min_size = models.get_model_weights(name).DEFAULT.meta["min_size"]
            least = _MIN_SIZE.get(name) or max(min_size)
            if self.image_size < least:
                raise RequestError(
                    f"--model {self.name} takes images of {least} pixels or more, not "
                    f"--image_size {self.image_size}"
                )
        if name in _AUXILIARY_WEIGHTS:
            options = {"aux_logits": True, "init_weights": True}
        net = models.get_model(name, weights=None, num_classes=num_classes, **options)
        return Classifier(net, num_classes)


class Family:
    """All models that torchvision registers, except video, quantised and optical-flow models."""

    prefixed = True
    names = ()

    @staticmethod
    def spec(name: str) -> Spec:
        """Return the spec of any torchvision model, which builds it with random weights.

        Raises:
            RequestError: the model is unknown; the message lists the closest names.
        """
        segmenters = registered.names("torchvision", "models/segmentation")
        detectors = registered.names("torchvision", "models/detection")
        classifiers = registered.names("torchvision", "models")
        registered.check("torchvision", name, (*classifiers, *segmenters, *detectors))
        full = f"torchvision:{name}"
        if name in segmenters:
            return Segmentation(full)
        if name in detectors:
            return Detection(full, image_size=detection.SIZES.get(name, Detection.image_size))
        weight = _AUXILIARY_WEIGHTS.get(name, 0.0)
        return _TorchvisionClassification(full, nn.Identity, auxiliary_weight=weight)
