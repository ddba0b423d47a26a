"""Language modelling: next-token loss and scores for any network that returns logits."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from accbench.distributed.collectives import RankGroup, all_to_all
from accbench.errors import RequestError
from accbench.models.tasks.classification import logits_of, sums_of_logits
from accbench.models.tasks.spec import TOKENS, Spec, out_of_range

_ATTENTION = "accbench_sdpa"
_GROUP = "context_parallel_group"
_HEADS = ("num_attention_heads", "num_key_value_heads")
_LABELS_PER_RANK = "labels_per_rank"
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

    def attend(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
    ) -> Any:
        """Attend with this rank's heads to all positions, where ranks have parts of sequences.

        Arrays are (N, H, T, D), and what is returned is (N, T, H, D).
        """
        group = getattr(module.config, _GROUP, None)
        if group is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        q, k, v = (all_to_all(x, group, cut=1, joined=2) for x in (query, key, value))
        out, weights = sdpa_attention_forward(module, q, k, v, attention_mask, **kwargs)
        return all_to_all(out, group, cut=1, joined=2), weights

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
        """Compute the mean cross-entropy of labelled tokens, in float32 or a wider model dtype."""
        logits_MV, labels_M = self.logits_and_labels(model, batch)
        logits_MV = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32))
        total = functional.cross_entropy(
            logits_MV, labels_M, ignore_index=IGNORED_LABEL, reduction="sum"
        )
        if _LABELS_PER_RANK in batch:  # those of the whole sequences, over the ranks
            num_labels = batch[_LABELS_PER_RANK].sum()
            return total / torch.where(num_labels > 0, num_labels, 1)
        return total / (labels_M != IGNORED_LABEL).sum().clamp(min=1)

    def share_sequences(self, net: nn.Module, group: RankGroup, tp: int) -> None:
        """Have a network compute with a part of each sequence.

        Args:
            net: of this spec.
            group: the ranks that share each sequence.
            tp: ranks that share each of its heads' parts.

        Raises:
            RequestError: it cannot; the message says why.
        """
        asked = f"--cp {group.size}"
        if not self.cuts_sequences:
            raise RequestError(
                f"{asked}: --model {self.name} needs whole sequences; leave --cp out"
            )
        if self.seq_len % group.size:
            raise RequestError(f"{asked}: --seq_len {self.seq_len} is no multiple of it")
        configs = {id(m.config): m.config for m in net.modules() if hasattr(m, "config")}
        if len(configs) != 1:
            raise RequestError(
                f"{asked}: --model {self.name} has {len(configs)} configurations of transformers, "
                "not one, so that its attention is not known; leave --cp out"
            )
        (config,) = configs.values()
        heads = {key: getattr(config, key, None) for key in _HEADS}
        for key, number in heads.items():
            if number is not None and number // tp % group.size:
                of_rank = f"{number} {key}{f', {number // tp} with --tp {tp}' if tp > 1 else ''}"
                raise RequestError(
                    f"{asked}: --model {self.name} has {of_rank}; use a divisor of them"
                )
        setattr(config, _GROUP, group)

    def part_of_sequences(self, group: RankGroup, batch: Any) -> Any:
        """Return a rank's part of a batch's sequences, and what it has to know of the whole."""
        labels_NT = batch["labels"]
        length, rest = divmod(labels_NT.shape[1], group.size)
        if rest:
            raise RequestError(
                f"--cp {group.size}: a batch has sequences of {labels_NT.shape[1]} tokens, no "
                "multiple of it"
            )
        part = slice(group.rank * length, (group.rank + 1) * length)
        positions_T = torch.arange(labels_NT.shape[1])[part]
        return {
            "input_ids": batch["input_ids"][:, part].contiguous(),
            "labels": labels_NT[:, part].contiguous(),
            "position_ids": positions_T.expand(len(labels_NT), -1).contiguous(),
            _LABELS_PER_RANK: (labels_NT != IGNORED_LABEL).sum(1) / group.size,
        }

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
