"""Recurrent language models of torch's own LSTM (Zaremba et al., Recurrent Neural Network
Regularization, 2014): dropout between the layers alone."""

from functools import partial

import torch
from torch import nn

from accbench.models.language import LanguageModel

# name -> (layers, width, dropout, tokens of the vocabulary); lstm is the paper's medium one.
_SIZES = {"lstm": (2, 650, 0.5, 10_000), "lstm_tiny": (2, 64, 0.1, 512)}
# The paper's.
_INITIAL_RANGE = 0.05


class LSTMLanguageModel(nn.Module):
    """Embedding, LSTM layers with dropout around them, and a head; begins at zeros."""

    def __init__(self, num_tokens: int, num_layers: int, width: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, width)
        # Layers of their own: nn.LSTM's dropout could not be given to all engines alike.
        self.layers = nn.ModuleList(
            nn.LSTM(width, width, batch_first=True) for _ in range(num_layers)
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, num_tokens)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -_INITIAL_RANGE, _INITIAL_RANGE)

    def forward(self, input_ids_NT: torch.Tensor) -> torch.Tensor:
        """Tokens (N, T) int64 to logits (N, T, V)."""
        hidden_NTH = self.dropout(self.embedding(input_ids_NT))
        for layer in self.layers:
            hidden_NTH = self.dropout(layer(hidden_NTH)[0])
        logits_NTV: torch.Tensor = self.head(hidden_NTH)
        return logits_NTV


def _build(name: str, num_tokens: int) -> nn.Module:
    num_layers, width, dropout, _ = _SIZES[name]
    return LSTMLanguageModel(num_tokens, num_layers, width, dropout)


class Family:
    """lstm and, for tests, lstm_tiny."""

    names = tuple(_SIZES)

    @staticmethod
    def spec(name: str) -> LanguageModel:
        """One of `names`, with random weights."""
        *_, num_tokens = _SIZES[name]
        return LanguageModel(name, partial(_build, name), num_tokens)
