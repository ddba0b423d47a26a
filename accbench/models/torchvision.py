"""All of torchvision's models for classes, segmentation and detection: `torchvision:NAME`."""

import dataclasses
from typing import Any

from torch import nn

from accbench.errors import RequestError
from accbench.models import Classifier, ImageClassification, detection, registered
from accbench.models.detection import Detection
from accbench.models.segmentation import Segmentation
from accbench.models.spec import Spec

# Weights of the losses of GoogLeNet's classifiers on the way (Szegedy et al., Going Deeper with
# Convolutions, 2014, section 5), and of Inception v3's as torchvision's training has it.
_AUXILIARY_WEIGHTS = {"googlenet": 0.3, "inception_v3": 0.4}
# Pixels that the classifier on the way needs, which what torchvision says leaves out.
_LEAST = {"inception_v3": 299}
# Models whose weights depend on the size of images, and what that has to be a multiple of.
_MULTIPLES = {
    "vit_b_16": 16, "vit_b_32": 32, "vit_l_16": 16, "vit_l_32": 32, "vit_h_14": 14, "maxvit_t": 224,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Classification(ImageClassification):
    auxiliary_weight: float = 0.0

    def __post_init__(self) -> None:
        multiple = _MULTIPLES.get(self._function, 1)
        if self.image_size % multiple:
            raise RequestError(
                f"--model {self.name} wants a multiple of {multiple} pixels, which --image_size "
                f"{self.image_size} is not"
            )

    @property
    def _function(self) -> str:
        return self.name.partition(":")[2]

    def build(self, num_classes: int) -> nn.Module:
        """The model on the host, weights drawn from torch's global generator.

        Raises:
            RequestError: it takes no images as small as these.
        """
        from torchvision import models

        name, options = self._function, dict[str, Any]()
        if name in _MULTIPLES:
            size = self.image_size
            options = {"image_size": size} if name != "maxvit_t" else {"input_size": (size, size)}
        elif not name.startswith("swin"):  # which fills its windows up
            least = _LEAST.get(name) or max(models.get_model_weights(name).DEFAULT.meta["min_size"])
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
    """What torchvision registers as models, but for videos, quantised ones and optical flow."""

    prefixed = True
    names = ()

    @staticmethod
    def spec(name: str) -> Spec:
        """Any of them, with random weights.

        Raises:
            RequestError: there is no such model; the message has the closest names.
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
        return _Classification(full, nn.Identity, auxiliary_weight=weight)
