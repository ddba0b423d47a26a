"""Small networks for `--model benchmarks.nets:NAME`, for images of 32 pixels."""

import dataclasses
import os
import time
from typing import Any, ClassVar

import torch
from torch import nn

from accbench.models import bert, gpt2
from accbench.models.tasks.language import (
    IGNORED_LABEL,
    LanguageModel,
    options_of_transformers,
)


def tiny(num_classes: int) -> nn.Module:
    """Return a convolution, BatchNorm and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, num_classes),
    )


def dropping(num_classes: int) -> nn.Module:
    """Return `tiny` with dropout of two kinds."""
    net = tiny(num_classes)
    net.insert(3, nn.Dropout2d(0.2))
    net.insert(6, nn.Dropout(0.3))
    return net


def slow_dropping(num_classes: int) -> nn.Module:
    """Return `dropping`, which sleeps SLOW_NET_S seconds in each forward pass."""
    net, seconds = dropping(num_classes), float(os.environ["SLOW_NET_S"])
    net.register_forward_pre_hook(lambda *_: time.sleep(seconds))
    return net


class _Transformer(nn.Module):
    """Embed patches, apply one torch encoder layer, average the tokens."""

    def __init__(self, num_classes: int, dropout: float, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.encoder = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens_NTC = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.encoder(tokens_NTC)).mean(1))


def transformer(num_classes: int) -> nn.Module:
    """Return one encoder layer with dropout over patches of 8 pixels."""
    return _Transformer(num_classes, dropout=0.1)


class _Tied(nn.Module):
    """Use one convolution weight under two names."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2)
        self.one = nn.Conv2d(16, 16, 3, padding=1)
        self.two = nn.Conv2d(16, 16, 3, padding=1)
        self.two.weight = self.one.weight
        self.head = nn.Linear(16, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.two(torch.relu(self.one(torch.relu(self.stem(images)))))
        return self.head(hidden.mean((2, 3)))


def tied(num_classes: int) -> nn.Module:
    """Return a network with a tied weight."""
    return _Tied(num_classes)


def _without_dropout(net: nn.Module) -> nn.Module:
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return net


def _gpt2_still(num_tokens: int) -> nn.Module:
    return _without_dropout(gpt2.Family.spec("gpt2_tiny").build(num_tokens))


def _bert_still(num_tokens: int) -> nn.Module:
    return _without_dropout(bert.Family.spec("bert_base").build(num_tokens))


def _titan_debug(num_tokens: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=num_tokens, max_position_embeddings=2048, hidden_size=256,
            intermediate_size=768, num_hidden_layers=6, num_attention_heads=16,
            num_key_value_heads=16,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            **options_of_transformers(),
        )
    )  # fmt: skip


# Models without dropout, whose masks are each worker's own: GPT-2 of two layers, BERT, and the
# shape of torchtitan's Llama debugmodel (torchtitan/models/llama3).
gpt2_still = LanguageModel("gpt2_still", _gpt2_still, 512, 1024, cuts_sequences=True)
bert_still = dataclasses.replace(
    bert.Family.spec("bert_base"), name="bert_still", build_net=_bert_still
)
titan_debug = LanguageModel("titan_debug", _titan_debug, 2048, 2048)


@dataclasses.dataclass(frozen=True)
class _AnswerModel(LanguageModel):
    """Predict what follows a prompt, the length of which is random."""

    ignores_labels: ClassVar = True

    def synthetic_batch(self, batch_size: int, num_classes: int, generator: torch.Generator) -> Any:
        batch = super().synthetic_batch(batch_size, num_classes, generator)
        prompts_N1 = torch.randint(0, self.seq_len, (batch_size, 1), generator=generator)
        batch["labels"][torch.arange(self.seq_len) < prompts_N1] = IGNORED_LABEL
        return batch


def _answers(num_tokens: int) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(num_tokens, 16), nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1),
        nn.Linear(32, num_tokens),
    )  # fmt: skip


# A model of tokens one by one, with ever other numbers of labels.
answers = _AnswerModel("answers", _answers)
