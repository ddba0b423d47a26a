"""Specs of losses and batches of their own."""

import dataclasses
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from accbench.models import Spec
from accbench.models.gpt2 import PIPELINE_PLAN
from accbench.models.llama import SEQUENCE_PARALLEL_PLAN, TENSOR_PARALLEL_PLAN
from accbench.models.tasks.language import LanguageModel, options_of_transformers
from benchmarks.nets import tied as tied


class Autoencoder(Spec):
    """A model with a loss and batches of its own: vectors that it should give back."""

    name = "tests.nets:Autoencoder"

    def build(self, num_classes: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 8))

    def loss(self, model: nn.Module, batch) -> torch.Tensor:
        vectors, weight = batch["vectors"]["of 8"], batch["weight"]
        away = (model(vectors) - vectors).float().square().mean(1)
        return (away * weight).mean()

    def synthetic_batch(self, batch_size: int, num_classes: int, generator: torch.Generator):
        vectors = torch.randn(batch_size, 8, generator=generator)
        return {"vectors": {"of 8": vectors}, "weight": torch.ones(batch_size)}


class Ragged(Autoencoder):
    """Whose batches are of ever other sizes."""

    name = "tests.nets:Ragged"

    def synthetic_batch(self, batch_size: int, num_classes: int, generator: torch.Generator):
        return super().synthetic_batch(
            int(torch.randint(1, 64, (), generator=generator)), num_classes, generator
        )


class Mislabelled(Autoencoder):
    """Vectors and their classes, of which the third batch has one that the model does not have."""

    name = "tests.nets:Mislabelled"

    def build(self, num_classes: int) -> nn.Module:
        return nn.Linear(8, 3)

    def loss(self, model: nn.Module, batch) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["vectors"]), batch["classes"])

    def synthetic_batch(self, batch_size: int, num_classes: int, generator: torch.Generator):
        self.num_batches = getattr(self, "num_batches", 0) + 1
        classes = torch.full((batch_size,), 3 if self.num_batches == 3 else 2)
        return {"vectors": torch.randn(batch_size, 8, generator=generator), "classes": classes}


class Recolours(Spec):
    """Images that it should give back; it has no accuracy."""

    name = "tests.nets:Recolours"
    takes = "images"

    def build(self, num_classes: int) -> nn.Module:
        return nn.Conv2d(3, 3, 1)

    def loss(self, model: nn.Module, batch) -> torch.Tensor:
        images_NCHW = batch[0].to(next(model.parameters()).dtype) / 255
        return (model(images_NCHW) - images_NCHW).float().square().mean()

    def synthetic_batch(self, batch_size: int, num_classes: int, generator: torch.Generator):
        raise NotImplementedError


def _build_many_heads(num_tokens: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    net = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=num_tokens, max_position_embeddings=64, hidden_size=64,
            intermediate_size=96, num_hidden_layers=1, num_attention_heads=8,
            num_key_value_heads=4, **options_of_transformers(),
        )
    )  # fmt: skip
    net.tensor_parallel_plan = TENSOR_PARALLEL_PLAN  # type: ignore[assignment]
    net.sequence_parallel_plan = SEQUENCE_PARALLEL_PLAN  # type: ignore[assignment]
    return net


many_heads = LanguageModel(
    "tests.nets:many_heads",
    _build_many_heads,
    max_seq_len=64,
    seq_len=16,
    cuts_sequences=True,
)
"""A Llama of one layer, with heads for two ways to share them."""


def _build_four_layers(num_tokens: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    net = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=num_tokens, max_position_embeddings=64, hidden_size=32,
            intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, **options_of_transformers(),
        )
    )  # fmt: skip
    net.tensor_parallel_plan = TENSOR_PARALLEL_PLAN  # type: ignore[assignment]
    net.sequence_parallel_plan = SEQUENCE_PARALLEL_PLAN  # type: ignore[assignment]
    return net


four_layers = LanguageModel(
    "tests.nets:four_layers", _build_four_layers, max_seq_len=64, seq_len=16, cuts_sequences=True
)
"""A Llama of four layers, with transformers' plan of its stages."""


def _build_four_tied_layers(num_tokens: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    net = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=num_tokens, n_positions=64, n_embd=32, n_layer=4, n_head=2,
            **options_of_transformers(),
        )
    )  # fmt: skip
    net.pipeline_plan = PIPELINE_PLAN  # type: ignore[assignment]
    return net


four_tied_layers = LanguageModel(
    "tests.nets:four_tied_layers", _build_four_tied_layers, max_seq_len=64, seq_len=16
)
"""A GPT-2 of four layers, whose embedding is its head's weight."""


@dataclasses.dataclass(frozen=True)
class _LaterLetters(LanguageModel):
    """A model of the letters from n on in a text of bytes, and of no others."""

    ignores_labels: ClassVar = True

    def logits_and_labels(self, model: nn.Module, batch):
        logits_MV, labels_M = super().logits_and_labels(model, batch)
        return logits_MV, labels_M.masked_fill(labels_M < ord("n"), -1)

    def count_labels(self, batch) -> int:
        return int((batch["labels"] >= ord("n")).sum())


later_letters = _LaterLetters(
    "tests.nets:later_letters",
    lambda num_tokens: nn.Sequential(nn.Embedding(num_tokens, 8), nn.Linear(8, num_tokens)),
)


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class _FlatHead(nn.Linear):
    """Returns a view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).view(*x.shape[:-1], -1)


class _LargeEnds(nn.Module):
    """An embedding and a head that are each larger than a block between them."""

    tensor_parallel_plan: ClassVar = {
        "embed": "embedding_rowwise", "blocks.*.up": "colwise", "blocks.*.down": "rowwise",
        "head": "colwise_gather_output",
    }  # fmt: skip

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_tokens, 8)
        self.blocks = nn.ModuleList([_Residual(8), _Residual(8)])
        self.norm, self.head = nn.LayerNorm(8), _FlatHead(8, num_tokens)
        self.num_passes = 0

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.start(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.logits(self.norm(x))
        self.num_passes += torch.is_grad_enabled()
        return logits

    def start(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed(input_ids)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).mul_(2)  # in place, of a view


class _TiedEnds(_LargeEnds):
    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self.head.weight = self.embed.weight


class _ReadEnds(_LargeEnds):
    """Calls neither end."""

    def start(self, input_ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(input_ids, self.embed.weight)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(x)

    def read(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.head.weight, self.head.bias)


class _EmbeddingAsHead(_LargeEnds):
    """Calls the embedding, and reads its weight for the logits; it has no other head."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        del self.head

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.embed.weight)


class _EndsInTurns(_ReadEnds):
    """Calls its head in the first pass, reads it in the second, does both in the next two."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        ways = [[self.head], [self.read], [self.head, self.read], [self.read, self.head]]
        return sum(way(x) for way in ways[self.num_passes % 4])


class _EndsInChunks(_ReadEnds):
    """Calls and reads its head in turn for parts of a sequence, of which it keeps no logits."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        ways = [self.head, self.read] * 2
        parts = zip(ways, x.chunk(4, dim=1), strict=True)
        return torch.cat([checkpoint(way, part, use_reentrant=False) for way, part in parts], 1)


large_ends, tied_ends, read_ends, embedding_as_head, ends_in_turns, ends_in_chunks = (
    LanguageModel(f"tests.nets:{name}", build, seq_len=16)
    for name, build in {
        "large_ends": _LargeEnds, "tied_ends": _TiedEnds, "read_ends": _ReadEnds,
        "embedding_as_head": _EmbeddingAsHead, "ends_in_turns": _EndsInTurns,
        "ends_in_chunks": _EndsInChunks,
    }.items()
)  # fmt: skip
"""Small decoders without attention; the names say how their embedding and head are used."""
