"""Vision transformers as torchvision builds them, in later papers' sizes tiny, small and base.

Source: Dosovitskiy et al., An Image Is Worth 16x16 Words, 2021.
"""

import dataclasses

from torch import nn

from accbench.errors import RequestError
from accbench.models import Classifier, ImageClassification

_PATCH = 16
# name -> (layers, heads, width); the MLPs are four times as wide.
_SIZES = {"vit_ti_16": (12, 3, 192), "vit_s_16": (12, 6, 384), "vit_b_16": (12, 12, 768)}
TENSOR_PARALLEL_PLAN = {
    "encoder.layers.*.self_attention": "multihead_attention",
    "encoder.layers.*.self_attention.out_proj": "rowwise",
    "encoder.layers.*.mlp.0": "colwise",
    "encoder.layers.*.mlp.3": "rowwise",
}
SEQUENCE_PARALLEL_PLAN = {
    "encoder.dropout": "scatter_input",
    "encoder.layers.*.ln_[12]": "sequence_parallel",
    "encoder.layers.*.self_attention": "gather_input",
    "encoder.layers.*.dropout": "sequence_parallel",
    "encoder.layers.*.mlp": "gather_input",
    "encoder.layers.*.mlp.4": "sequence_parallel",
    "encoder.ln": "gather_output",
}
PIPELINE_PLAN = [
    "class_token", "conv_proj", "encoder.pos_embedding", "encoder.layers.*", "encoder.ln", "heads"
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _VisionTransformer(ImageClassification):
    image_size: int = 224
    """Height and width in pixels; position embeddings are weights, so that the model fixes it."""

    def __post_init__(self) -> None:
        if self.image_size % _PATCH:
            raise RequestError(
                f"--model {self.name} cuts images into patches of {_PATCH} pixels: --image_size "
                f"must be a multiple of {_PATCH}, not {self.image_size}"
            )

    @property
    def sequence_length(self) -> int:
        """Patches of an image, and the class token."""
        return (self.image_size // _PATCH) ** 2 + 1

    def build(self, num_classes: int) -> nn.Module:
        from torchvision.models.vision_transformer import VisionTransformer

        num_layers, num_heads, width = _SIZES[self.name]
        net = VisionTransformer(
            image_size=self.image_size, patch_size=_PATCH, num_layers=num_layers,
            num_heads=num_heads, hidden_dim=width, mlp_dim=4 * width, num_classes=num_classes,
        )  # fmt: skip
        net.tensor_parallel_plan = TENSOR_PARALLEL_PLAN
        net.sequence_parallel_plan = SEQUENCE_PARALLEL_PLAN
        net.pipeline_plan = PIPELINE_PLAN
        return Classifier(net, num_classes)


class Family:
    """The models vit_ti_16, vit_s_16 and vit_b_16."""

    names = tuple(_SIZES)

    @staticmethod
    def spec(name: str) -> ImageClassification:
        """Return the spec of a model in `names`, which builds it with random weights."""
        return _VisionTransformer(name, nn.Identity)
