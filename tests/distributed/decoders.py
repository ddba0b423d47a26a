"""A small decoder with every plan by which ranks share a model, of torch's own layers.

transformers' models take seconds to import, in each worker of each run. Here the ways to share a
model are one after the other; with transformers' models they are in `tests.scripts.sharded_ranks`.
"""

import os
import signal
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from accbench.models.language import LanguageModel
from accbench.models.tasks import context_parallel

_WIDTH, _NUM_HEADS, _MAX_SEQ_LEN = 16, 4, 64


def _attend(_module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _mask: Any) -> Any:
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).contiguous(), None


class _Attention(nn.Module):
    head_dim = _WIDTH // _NUM_HEADS

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config = config
        # Without biases: the gradient of that of keys is nothing but rounding.
        self.q, self.k, self.v = (nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        attended, _ = context_parallel.attend(_attend, self, q, k, v, None)
        return self.out(attended.flatten(2))


class _Block(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(_WIDTH), _Attention(config)
        self.mlp_norm = nn.LayerNorm(_WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(_WIDTH, 2 * _WIDTH), nn.SiLU(), nn.Linear(2 * _WIDTH, _WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.mlp_norm(x))


class _Decoder(nn.Module):
    """Embeddings of tokens and positions, two blocks, and a head."""

    tensor_parallel_plan: ClassVar = {
        "words": "embedding_rowwise", "blocks.*.attention.[qkv]": "colwise",
        "blocks.*.attention.out": "rowwise", "blocks.*.mlp.0": "colwise",
        "blocks.*.mlp.2": "rowwise", "head": "colwise_gather_output",
    }  # fmt: skip
    sequence_parallel_plan: ClassVar = {
        "blocks.0": "scatter_input", "blocks.*norm": "sequence_parallel",
        "blocks.*.attention": "gather_input", "blocks.*.mlp": "gather_input",
        "norm": "gather_output",
    }  # fmt: skip
    pipeline_plan: ClassVar = ["words", "positions", "blocks.*", "norm", "head"]

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        config = SimpleNamespace(num_attention_heads=_NUM_HEADS, num_key_value_heads=_NUM_HEADS)
        self.words = nn.Embedding(num_tokens, _WIDTH)
        self.positions = nn.Embedding(_MAX_SEQ_LEN, _WIDTH)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, num_tokens)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.words(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _build_killed_on_rank1(num_tokens: int) -> nn.Module:
    net, num_calls = _Decoder(num_tokens), 0

    def kill(*_: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3 and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    net.blocks[1].attention.register_forward_pre_hook(kill)
    return net


def _build_with_slopes(num_tokens: int) -> nn.Module:
    """Return a decoder with trained slopes between the layers that `--tp` cuts."""
    net = _Decoder(num_tokens)
    for block in net.blocks:
        block.mlp[1] = nn.PReLU()
    return net


def _build_with_summed_slopes(num_tokens: int) -> nn.Module:
    net = _build_with_slopes(num_tokens)
    plan = {"blocks.*.mlp.1": "replicated_with_grad_allreduce"}
    net.tensor_parallel_plan = _Decoder.tensor_parallel_plan | plan
    return net


decoder, killed_on_rank1, with_slopes, with_summed_slopes = (
    LanguageModel(
        f"{__name__}:{name}", build, max_seq_len=_MAX_SEQ_LEN, seq_len=16, cuts_sequences=True
    )
    for name, build in {
        "decoder": _Decoder, "killed_on_rank1": _build_killed_on_rank1,
        "with_slopes": _build_with_slopes, "with_summed_slopes": _build_with_summed_slopes,
    }.items()
)  # fmt: skip
"""The decoder, one whose rank 1 is killed amid its third forward pass, and two whose MLPs train
slopes between their layers, of which a plan says nothing, or that gradients are summed."""
