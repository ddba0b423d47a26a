"""Context parallelism of transformers' networks: ranks compute with parts of sequences (`--cp`)."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from accbench.distributed.collectives import RankGroup, all_to_all
from accbench.distributed.ring_attention import chunks_per_rank, ring_attention
from accbench.errors import RequestError

Algorithm = Literal["ulysses", "ring"]
_SHARE = "sequence_share"
_HEADS = ("num_attention_heads", "num_key_value_heads")
_DROPOUTS = ("attention_dropout", "attn_dropout")
# What some attentions of transformers add to scores or leave out of them.
_NOT_BY_RING = ("position_bias", "softcap", "sliding_window", "s_aux")


@dataclasses.dataclass(frozen=True)
class SequenceShare:
    """A way for ranks to share sequences."""

    group: RankGroup
    """The ranks that share each sequence."""
    algorithm: Algorithm = "ulysses"
    """The way in which they attend to each other's parts (`--cp_attention`)."""

    @property
    def flags(self) -> str:
        """The flags that ask for it."""
        ring = " --cp_attention ring" if self.algorithm == "ring" else ""
        return f"--cp {self.group.size}{ring}"

    @property
    def num_chunks(self) -> int:
        """Number of equal chunks that a sequence is cut into."""
        return self.group.size * (2 if self.algorithm == "ring" else 1)

    def positions(self, num_tokens: int) -> torch.Tensor:
        """Return the positions of a sequence that this rank has, int64 (T / ranks,)."""
        if self.algorithm == "ring":
            return chunks_per_rank(num_tokens, self.group)
        return torch.arange(num_tokens).chunk(self.group.size)[self.group.rank]


def set_share(net: nn.Module, share: SequenceShare, tp: int, model: str) -> None:
    """Have a network's attention go by a share of sequences.

    Args:
        net: whose attention is `attend`.
        share: how ranks share sequences.
        tp: ranks that share each of its heads' parts.
        model: its name, for messages.

    Raises:
        RequestError: it cannot; the message says why.
    """
    configs = {id(m.config): m.config for m in net.modules() if hasattr(m, "config")}
    if len(configs) != 1:
        raise RequestError(
            f"{share.flags}: --model {model} has {len(configs)} configurations of transformers, "
            "not one, so that its attention is not known; leave --cp out"
        )
    (config,) = configs.values()
    if share.algorithm == "ring":
        _refuse_dropout(net, share, model)
    else:
        _refuse_heads(config, share, tp, model)
    setattr(config, _SHARE, share)


def attend(
    attention: Callable[..., Any], module: Any, query: torch.Tensor, key: torch.Tensor,
    value: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Any,
) -> tuple[torch.Tensor, Any]:  # fmt: skip
    """Attend to all positions, of which ranks may have parts.

    Arrays are (N, H, T, D), and what is returned is (N, T, H, D), and weights or None.

    Args:
        attention: transformers' attention for whole sequences.
        module: the layer.
        query: at this rank's positions.
        key: likewise.
        value: likewise.
        attention_mask: of whole sequences; None: the layer's own mask.
        kwargs: the attention's other arguments.
    """
    share: SequenceShare | None = getattr(module.config, _SHARE, None)
    if share is None:
        return attention(module, query, key, value, attention_mask, **kwargs)
    if share.algorithm == "ring":
        return _attend_by_ring(share, module, query, key, value, attention_mask, **kwargs), None
    group = share.group
    q, k, v = (all_to_all(x, group, cut=1, joined=2) for x in (query, key, value))
    out, weights = attention(module, q, k, v, attention_mask, **kwargs)
    return all_to_all(out, group, cut=1, joined=2), weights


def _attend_by_ring(
    share: SequenceShare, module: Any, query: torch.Tensor, key: torch.Tensor,
    value: torch.Tensor, attention_mask: torch.Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, **kwargs: Any,
) -> torch.Tensor:  # fmt: skip
    others = [name for name in _NOT_BY_RING if kwargs.get(name) is not None]
    others += ["attention_mask"] * (attention_mask is not None) + ["dropout"] * (dropout > 0)
    if others:
        raise RequestError(
            f"{share.flags}: attention with {', '.join(others)} is not for the ring; use "
            "--cp_attention ulysses"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out = ring_attention(query, key, value, share.group, causal, scaling)
    return out.transpose(1, 2).contiguous()


def _refuse_heads(config: Any, share: SequenceShare, tp: int, model: str) -> None:
    heads = {key: getattr(config, key, None) for key in _HEADS}
    for key, number in heads.items():
        if number is not None and number // tp % share.group.size:
            of_rank = f"{number} {key}{f', {number // tp} with --tp {tp}' if tp > 1 else ''}"
            raise RequestError(
                f"{share.flags}: --model {model} has {of_rank}; use a divisor of them, or "
                "--cp_attention ring"
            )


def _refuse_dropout(net: nn.Module, share: SequenceShare, model: str) -> None:
    values = [getattr(module, name, 0) for module in net.modules() for name in _DROPOUTS]
    dropout = max((getattr(value, "p", value) for value in values), default=0)
    if dropout > 0:
        raise RequestError(
            f"{share.flags}: --model {model} drops attention's weights with probability "
            f"{dropout}, which the ring cannot; use --cp_attention ulysses"
        )
