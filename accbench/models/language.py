"""Language models: what trains them to tell the next token, whatever they are made of."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from accbench.errors import RequestError
from accbench.models.classification import logits_of, sums_of_logits
from accbench.models.spec import TOKENS, Spec, out_of_range

_ATTENTION = "accbench_sdpa"
IGNORED_LABEL = -1
"""Of tokens that are not to be told, as `accbench.data` pads short batches with."""


def options_of_transformers() -> dict[str, Any]:
    """What configurations of transformers are given: torch's own attention, and no cache.

    Under a name of its own, for which transformers makes no masks: blocks are whole, so that
    attention needs none but the causal one, which torch has. To see whether there are several
    texts in a sample, transformers would read a number from the device in every step.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(_ATTENTION, sdpa_attention_forward)
    return {
        "attn_implementation": _ATTENTION, "use_cache": False,
        "bos_token_id": None, "eos_token_id": None,
        "pad_token_id": None,  # else that token's embedding would not be trained
    }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LanguageModel(Spec):
    """`input_ids` (N, T) int64 and `labels` (N, T) int64: the token that follows each.

    A label of -1 counts for nothing. Both come from the data, which has shifted the labels.
    """

    takes: ClassVar = TOKENS
    unit: ClassVar = "tokens"
    name: str
    build_net: Callable[[int], nn.Module]
    """Called with the size of the vocabulary; its module maps `input_ids` to logits (N, T, V),
    in any form that `logits_of` knows."""
    usual_num_classes: int = 512  # type: ignore[misc]  # a class variable of specs without sizes
    """The size of the vocabulary that was published with the model."""
    max_seq_len: int | None = None
    """Tokens that it has positions for; None: any number."""
    seq_len: int = 128
    """Tokens of a sample."""

    def __post_init__(self) -> None:
        if self.max_seq_len is not None and self.seq_len > self.max_seq_len:
            raise RequestError(
                f"--model {self.name} has positions for {self.max_seq_len} tokens, fewer than "
                f"--seq_len {self.seq_len}"
            )

    @property
    def units_per_sample(self) -> int:
        """Tokens."""
        return self.seq_len

    def build(self, num_classes: int) -> nn.Module:
        """The model on the host, weights drawn from torch's global generator."""
        return self.build_net(num_classes)

    def told(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits (N * T, V), and the tokens that they should tell, (N * T,) int64."""
        logits_NTV = logits_of(model(batch["input_ids"]))
        return logits_NTV.flatten(0, 1), batch["labels"].flatten()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Cross-entropy, mean over the tokens with a label; float32, or wider if the model is."""
        logits_MV, labels_M = self.told(model, batch)
        logits_MV = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32))
        total = functional.cross_entropy(
            logits_MV, labels_M, ignore_index=IGNORED_LABEL, reduction="sum"
        )
        return total / (labels_M != IGNORED_LABEL).sum().clamp(min=1)

    def score(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Sums over the tokens with a label: loss, top-1, top-5, tokens; (4,)."""
        return sums_of_logits(*self.told(model, batch))

    def synthetic_batch(self, batch_size: int, num_classes: int, generator: torch.Generator) -> Any:
        """Random tokens, and those that follow them."""
        shape = (batch_size, self.seq_len + 1)
        return shifted(torch.randint(0, num_classes, shape, generator=generator))

    def problem(self, batch: Any, num_classes: int) -> str | None:
        """Tokens outside of the vocabulary; a label of -1 is none."""
        return out_of_range("tokens are", batch["input_ids"], num_classes) or out_of_range(
            "labels are", batch["labels"], num_classes, least=IGNORED_LABEL
        )


def shifted(blocks_NU: torch.Tensor) -> dict[str, torch.Tensor]:
    """A batch from blocks of T + 1 tokens each, (N, T + 1) int64."""
    # Contiguous, for they are copied to a device and cut into parts.
    return {
        "input_ids": blocks_NU[:, :-1].contiguous(),
        "labels": blocks_NU[:, 1:].contiguous(),
    }
