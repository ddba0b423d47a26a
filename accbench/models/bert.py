"""BERT as transformers builds it, trained as a masked language model (Devlin et al., 2019)."""

import dataclasses
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from accbench.models.tasks.language import (
    IGNORED_LABEL,
    LanguageModel,
    options_of_transformers,
)
from accbench.models.tasks.spec import Wrapper

# name -> (layers, heads, width, vocabulary size without [MASK]); the tiny one is from
# Turc et al., Well-Read Students Learn Better, 2019.
_SIZES = {"bert_base": (12, 12, 768, 30521), "bert_tiny": (2, 2, 128, 511)}
_POSITIONS = 512
# The fraction of all tokens that the model predicts; of these, the fraction that is masked, and
# the fraction that is masked or replaced.
_PREDICTED, _MASKED, _CHANGED = 0.15, 0.8, 0.9
_UINT32_MASK = 0xFFFFFFFF
TENSOR_PARALLEL_PLAN = {
    "bert.embeddings.word_embeddings": "embedding_rowwise",
    "bert.encoder.layer.*.attention.self.query": "colwise",
    "bert.encoder.layer.*.attention.self.key": "colwise",
    "bert.encoder.layer.*.attention.self.value": "colwise",
    "bert.encoder.layer.*.output.dense": "rowwise",
    "bert.encoder.layer.*.intermediate.dense": "colwise",
    "cls.predictions.decoder": "colwise_gather_output",
}
SEQUENCE_PARALLEL_PLAN = {
    "bert.embeddings.LayerNorm": "scatter_input",
    "bert.embeddings.dropout": "sequence_parallel",
    "bert.encoder.layer.*.attention.self": "gather_input",
    "bert.encoder.layer.*.intermediate": "gather_input",
    "bert.encoder.layer.*output.dropout": "sequence_parallel",
    "bert.encoder.layer.*output.LayerNorm": "sequence_parallel",
    "cls.predictions.transform.dense": "sequence_parallel",
    "cls.predictions.transform.LayerNorm": "gather_output",
}
PIPELINE_PLAN = ["bert.embeddings", "bert.encoder.layer.*", "cls"]


def _hash32(numbers: torch.Tensor) -> torch.Tensor:
    """Hash int64 numbers to 32 bits, by lowbias32 of Wellons's hash-prospector.

    Products stay below 2^63, because compilers disagree about int64 overflow.
    """
    numbers = (numbers ^ (numbers >> 16)) * 0x7FEB352D & _UINT32_MASK
    numbers = (numbers ^ (numbers >> 15)) * 0x046CA68B & _UINT32_MASK
    return numbers ^ (numbers >> 16)


def mask_tokens(
    input_ids_NT: torch.Tensor, labels_NT: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask a batch of text for masked language modelling.

    15 % of the tokens are predicted: of these, 80 % become the mask token `num_tokens`, 10 %
    become another token and 10 % stay. A hash of a sample's tokens and positions chooses them, so
    that a text gets the same masks on every device, in every engine and in every epoch. The
    original BERT also fixed its masks, but had ten different ones for each text. `labels_NT` is
    -1 at padding, which is never predicted.

    Returns:
        (input ids, labels), both (N, T) int64; a label is the original token, or -1 where the
        model predicts nothing.
    """
    positions_T = torch.arange(input_ids_NT.shape[1], device=input_ids_NT.device)
    hashes_NT = _hash32(input_ids_NT + 65_537 * positions_T)
    text_hash_N1 = hashes_NT.sum(dim=1, keepdim=True) & _UINT32_MASK
    choice_NT = _hash32(hashes_NT ^ text_hash_N1)
    action_NT, replacement_NT = _hash32(choice_NT + 1), _hash32(choice_NT + 2)
    is_predicted_NT = (choice_NT < int(_PREDICTED * 2**32)) & (labels_NT != IGNORED_LABEL)
    is_masked_NT = is_predicted_NT & (action_NT < int(_MASKED * 2**32))
    is_replaced_NT = is_predicted_NT & ~is_masked_NT & (action_NT < int(_CHANGED * 2**32))
    masked_ids_NT = torch.where(is_replaced_NT, replacement_NT % num_tokens, input_ids_NT)
    masked_ids_NT = masked_ids_NT.masked_fill(is_masked_NT, num_tokens)
    return masked_ids_NT, input_ids_NT.masked_fill(~is_predicted_NT, IGNORED_LABEL)


class MaskedBert(Wrapper):
    """BERT that masks its own input.

    Its vocabulary has one token more than the data: [MASK], the last.
    """

    def __init__(self, net: nn.Module, num_tokens: int) -> None:
        super().__init__()
        self.net, self.num_tokens = net, num_tokens

    def forward(
        self, input_ids_NT: torch.Tensor, labels_NT: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (logits (N, T, V + 1), labels (N, T)) of a text, masked by `mask_tokens`."""
        masked_ids_NT, labels_NT = mask_tokens(input_ids_NT, labels_NT, self.num_tokens)
        return self.net(masked_ids_NT).logits, labels_NT


def _build(name: str, num_tokens: int) -> nn.Module:
    # Imported here: the import takes seconds, and a launcher needs only the models' names.
    from transformers import BertConfig, BertForMaskedLM

    num_layers, num_heads, width, _ = _SIZES[name]
    config = BertConfig(
        vocab_size=num_tokens + 1, max_position_embeddings=_POSITIONS, hidden_size=width,
        intermediate_size=4 * width, num_hidden_layers=num_layers,
        num_attention_heads=num_heads, **options_of_transformers(),
    )  # fmt: skip
    net = BertForMaskedLM(config)
    net.tensor_parallel_plan = TENSOR_PARALLEL_PLAN  # type: ignore[assignment]
    net.sequence_parallel_plan = SEQUENCE_PARALLEL_PLAN  # type: ignore[assignment]
    net.pipeline_plan = PIPELINE_PLAN  # type: ignore[assignment]
    return MaskedBert(net, num_tokens)


@dataclasses.dataclass(frozen=True)
class _MaskedLanguageModel(LanguageModel):
    """A language model that predicts masked tokens instead of next tokens."""

    ignores_labels: ClassVar = True

    def logits_and_labels(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits_NTV, labels_NT = model(batch["input_ids"], batch["labels"])
        return logits_NTV.flatten(0, 1), labels_NT.flatten()

    def count_labels(self, batch: Any) -> int:
        """Count the tokens of a batch on the host that the model will mask and predict."""
        _, labels_NT = mask_tokens(batch["input_ids"], batch["labels"], self.usual_num_classes)
        return int((labels_NT != IGNORED_LABEL).sum())


class Family:
    """The models bert_base and, for CPUs, bert_tiny."""

    names = tuple(_SIZES)

    @staticmethod
    def spec(name: str) -> LanguageModel:
        """Return the spec of a model in `names`, which builds it with random weights."""
        *_, num_tokens = _SIZES[name]
        return _MaskedLanguageModel(name, partial(_build, name), num_tokens, _POSITIONS)
