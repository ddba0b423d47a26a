"""Language modelling: next-token loss and scores for any network that returns logits."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from accbench.distributed.collectives import RankGroup
from accbench.errors import RequestError
from accbench.models.tasks import context_parallel
from accbench.models.tasks.classification import logits_of, sums_of_logits
from accbench.models.tasks.spec import TOKENS, Spec, out_of_range

_ATTENTION = "accbench_sdpa"
_LABEL_COUNTS = "label_counts"
IGNORED_LABEL = -1
"""The label of tokens that the model does not predict, also of padding from `accbench.data`."""


def options_of_transformers() -> dict[str, Any]:
    """Return options for a transformers configuration: torch's attention, and no cache.

    The attention is registered under a name of its own, for which transformers makes no masks:
    samples are full blocks, so that attention needs only the causal mask, which torch has. To
    detect several texts in one sample, transformers would wait for the device in every step.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(*args: Any, **kwargs: Any) -> Any:
        """Attend as transformers does, also where ranks have parts of sequences."""
        return context_parallel.attend(sdpa_attention_forward, *args, **kwargs)

    AttentionInterface.register(_ATTENTION, attend)
    return {
        "attn_implementation": _ATTENTION, "use_cache": False,
        "bos_token_id": None, "eos_token_id": None,
        "pad_token_id": None,  # else that token's embedding would not be trained
    }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LanguageModel(Spec):
    """A model that predicts the next token: `input_ids` and `labels`, both (N, T) int64.

    Each label is the token after its input token, or -1 to ignore it; the data source shifts them.
    """

    takes: ClassVar = TOKENS
    unit: ClassVar = "tokens"
    ignores_padding: ClassVar = True
    name: str
    build_net: Callable[[int], nn.Module]
    """Called with the vocabulary size; its module maps `input_ids` to logits (N, T, V), in any form
    that `logits_of` accepts."""
    usual_num_classes: int = 512  # type: ignore[misc]  # a class variable of specs without sizes
    """Vocabulary size of the published model."""
    max_seq_len: int | None = None
    """Longest sequence in tokens that the model has positions for; None: no limit."""
    seq_len: int = 128
    """Tokens per sample."""
    cuts_sequences: bool = False
    """Whether the network takes `position_ids` and attends as `options_of_transformers` has it,
    so that ranks may share a sequence (`--cp`)."""

    def __post_init__(self) -> None:
        if self.max_seq_len is not None and self.seq_len > self.max_seq_len:
            raise RequestError(
                f"--model {self.name} has positions for {self.max_seq_len} tokens, fewer than "
                f"--seq_len {self.seq_len}"
            )

    @property
    def units_per_sample(self) -> int:
        """Number of tokens in a sample."""
        return self.seq_len

    @property
    def sequence_length(self) -> int:
        """Positions of a sample that the network computes with."""
        return self.seq_len

    def build(self, num_classes: int) -> nn.Module:
        """Build the model on the host, with weights drawn from torch's global generator."""
        return self.build_net(num_classes)

    def logits_and_labels(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits (N * T, V), and the labels that they should predict, (N * T,) int64."""
        positions = {key: batch[key] for key in ("position_ids",) if key in batch}
        logits_NTV = logits_of(model(batch["input_ids"], **positions))
        return logits_NTV.flatten(0, 1), batch["labels"].flatten()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Compute the mean cross-entropy of labelled tokens, in float32 or a wider model dtype.

        It is 0 where there are none. A batch with `with_label_counts` is a part of more.
        """
        logits_MV, labels_M = self.logits_and_labels(model, batch)
        logits_MV = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32))
        total = functional.cross_entropy(
            logits_MV, labels_M, ignore_index=IGNORED_LABEL, reduction="sum"
        )
        if _LABEL_COUNTS in batch:
            num_labels = batch[_LABEL_COUNTS].sum()
            return total / torch.where(num_labels > 0, num_labels, 1)
        return total / (labels_M != IGNORED_LABEL).sum().clamp(min=1)

    @property
    def counts_labels(self) -> bool:
        """Whether labels can be counted: not those of a subclass that computes with others."""
        kind, base = type(self), LanguageModel
        is_base = kind.loss is base.loss and kind.logits_and_labels is base.logits_and_labels
        return is_base or kind.count_labels is not base.count_labels

    def count_labels(self, batch: Any) -> int:
        """Count the labelled tokens of a batch on the host."""
        return int((batch["labels"] != IGNORED_LABEL).sum())

    def with_label_counts(self, batch: Any, labels_N: torch.Tensor) -> Any:
        """See the base class."""
        return {**batch, _LABEL_COUNTS: labels_N}

    def share_sequences(
        self, net: nn.Module, group: RankGroup, tp: int,
        algorithm: context_parallel.Algorithm = "ulysses",
    ) -> None:  # fmt: skip
        """Have a network compute with a part of each sequence.

        Args:
            net: of this spec.
            group: the ranks that share each sequence.
            tp: ranks that share each of its heads' parts.
            algorithm: how they attend to each other's parts.

        Raises:
            RequestError: it cannot; the message says why.
        """
        share = context_parallel.SequenceShare(group, algorithm)
        if not self.cuts_sequences:
            raise RequestError(
                f"{share.flags}: --model {self.name} needs whole sequences; leave --cp out"
            )
        if self.seq_len % share.num_chunks:
            raise RequestError(
                f"{share.flags}: --seq_len {self.seq_len} is no multiple of {share.num_chunks}"
            )
        context_parallel.set_share(net, share, tp, self.name)

    def part_of_sequences(
        self, group: RankGroup, batch: Any, algorithm: context_parallel.Algorithm = "ulysses"
    ) -> Any:
        """Return a rank's part of a batch's sequences, and what it has to know of the whole."""
        share = context_parallel.SequenceShare(group, algorithm)
        labels_NT = batch["labels"]
        num_samples, num_tokens = labels_NT.shape
        if num_tokens % share.num_chunks:
            raise RequestError(
                f"{share.flags}: a batch has sequences of {num_tokens} tokens, no multiple of "
                f"{share.num_chunks}"
            )
        positions_T = share.positions(num_tokens)
        cut = {
            "input_ids": batch["input_ids"][:, positions_T],
            "labels": labels_NT[:, positions_T],
            "position_ids": positions_T.expand(num_samples, -1).contiguous(),
        }
        labels_N = (labels_NT != IGNORED_LABEL).sum(1)
        return self.with_label_counts(cut, labels_N / group.size)

    def score(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return sums over the labelled tokens: loss, top-1, top-5, tokens; (4,)."""
        return sums_of_logits(*self.logits_and_labels(model, batch))

    def synthetic_batch(self, batch_size: int, num_classes: int, generator: torch.Generator) -> Any:
        """Return random tokens, and the tokens that follow them as labels."""
        shape = (batch_size, self.seq_len + 1)
        return shifted(torch.randint(0, num_classes, shape, generator=generator))

    def problem(self, batch: Any, num_classes: int) -> str | None:
        """Return a line about tokens outside the vocabulary; a label of -1 is fine."""
        return out_of_range("tokens are", batch["input_ids"], num_classes) or out_of_range(
            "labels are", batch["labels"], num_classes, least=IGNORED_LABEL
        )


def shifted(blocks_NU: torch.Tensor) -> dict[str, torch.Tensor]:
    """Build a batch from blocks of T + 1 tokens each, (N, T + 1) int64."""
    # Contiguous, because both are copied to a device and split into micro-batches.
    return {
        "input_ids": blocks_NU[:, :-1].contiguous(),
        "labels": blocks_NU[:, 1:].contiguous(),
    }
