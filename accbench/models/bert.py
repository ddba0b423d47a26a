"""BERT as transformers builds it, trained to tell masked tokens (Devlin et al., 2019)."""

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import nn

from accbench.models.language import IGNORED_LABEL, LanguageModel, options_of_transformers

# name -> (layers, heads, width, tokens of the vocabulary without [MASK]); the tiny one is that
# of Turc et al., Well-Read Students Learn Better, 2019.
_SIZES = {"bert_base": (12, 12, 768, 30521), "bert_tiny": (2, 2, 128, 511)}
_POSITIONS = 512
# Of all tokens, those that are to be told; of these, as parts of 1, those that are masked, and
# those that are masked or replaced.
_TOLD, _MASKED, _CHANGED = 0.15, 0.8, 0.9
_WORD = 0xFFFFFFFF


def _scrambled(numbers: torch.Tensor) -> torch.Tensor:
    """int64 to 32 bits that look drawn, after the lowbias32 of Wellons's hash-prospector.

    Products stay below 2^63, for not all compilers agree on what is beyond.
    """
    numbers = (numbers ^ (numbers >> 16)) * 0x7FEB352D & _WORD
    numbers = (numbers ^ (numbers >> 15)) * 0x046CA68B & _WORD
    return numbers ^ (numbers >> 16)


def masked(
    input_ids_NT: torch.Tensor, labels_NT: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the model is given, the tokens it has to tell or -1); both (N, T) int64.

    15 % of the tokens are to be told: 80 % of them are masked by the token `num_tokens`, 10 %
    replaced by another, 10 % left. Which ones follows from the text itself, by a hash of a
    sample's tokens and places: the same on every device and in every engine, and the same each
    time that a text comes. So were the masks that BERT was published with, but for ten different
    ones of each text. Where `labels_NT` is -1 there is no text.
    """
    places_T = torch.arange(input_ids_NT.shape[1], device=input_ids_NT.device)
    numbers_NT = _scrambled(input_ids_NT + 65_537 * places_T)
    of_text_N1 = numbers_NT.sum(dim=1, keepdim=True) & _WORD
    drawn_NT = _scrambled(numbers_NT ^ of_text_N1)
    kind_NT, other_NT = _scrambled(drawn_NT + 1), _scrambled(drawn_NT + 2)
    told_NT = (drawn_NT < int(_TOLD * 2**32)) & (labels_NT != IGNORED_LABEL)
    is_masked_NT = told_NT & (kind_NT < int(_MASKED * 2**32))
    is_other_NT = told_NT & ~is_masked_NT & (kind_NT < int(_CHANGED * 2**32))
    given_NT = torch.where(is_other_NT, other_NT % num_tokens, input_ids_NT)
    given_NT = given_NT.masked_fill(is_masked_NT, num_tokens)
    return given_NT, input_ids_NT.masked_fill(~told_NT, IGNORED_LABEL)


class MaskedBert(nn.Module):
    """BERT behind the masks. Its vocabulary has one token more than the data: [MASK], the last."""

    def __init__(self, net: nn.Module, num_tokens: int) -> None:
        super().__init__()
        self.net, self.num_tokens = net, num_tokens

    def forward(
        self, input_ids_NT: torch.Tensor, labels_NT: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Text to (logits (N, T, V + 1), the tokens to be told (N, T)), see `masked`."""
        given_NT, told_NT = masked(input_ids_NT, labels_NT, self.num_tokens)
        return self.net(given_NT).logits, told_NT


def _build(name: str, num_tokens: int) -> nn.Module:
    # Imported where it is used: that takes seconds, and a launcher needs only names.
    from transformers import BertConfig, BertForMaskedLM

    num_layers, num_heads, width, _ = _SIZES[name]
    config = BertConfig(
        vocab_size=num_tokens + 1, max_position_embeddings=_POSITIONS, hidden_size=width,
        intermediate_size=4 * width, num_hidden_layers=num_layers,
        num_attention_heads=num_heads, **options_of_transformers(),
    )  # fmt: skip
    return MaskedBert(BertForMaskedLM(config), num_tokens)


@dataclasses.dataclass(frozen=True)
class _MaskedLanguageModel(LanguageModel):
    """Tells masked tokens, and not those that follow."""

    def told(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits_NTV, labels_NT = model(batch["input_ids"], batch["labels"])
        return logits_NTV.flatten(0, 1), labels_NT.flatten()


class Family:
    """bert_base and, for CPUs, bert_tiny."""

    names = tuple(_SIZES)

    @staticmethod
    def spec(name: str) -> LanguageModel:
        """One of `names`, with random weights."""
        *_, num_tokens = _SIZES[name]
        return _MaskedLanguageModel(name, partial(_build, name), num_tokens, _POSITIONS)
