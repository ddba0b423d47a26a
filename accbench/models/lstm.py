"""Recurrent language models of torch's LSTM, with dropout between the layers alone.

Source: Zaremba et al., Recurrent Neural Network Regularization, 2014.
"""

from functools import partial

import torch
from torch import nn

from accbench.models.tasks.language import LanguageModel

# name -> (layers, width, dropout, vocabulary size); lstm is the paper's medium one.
_SIZES = {"lstm": (2, 650, 0.5, 10_000), "lstm_tiny": (2, 64, 0.1, 512)}
# Initial weights are uniform within this range, as in the paper.
_INITIAL_RANGE = 0.05


class LSTMLanguageModel(nn.Module):
    """An embedding, LSTM layers with dropout around them, and a head; initial states are zero."""

    def __init__(self, num_tokens: int, num_layers: int, width: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, width)
        # One nn.LSTM per layer: the engines could not all apply nn.LSTM's own dropout alike.
        self.layers = nn.ModuleList(
            nn.LSTM(width, width, batch_first=True) for _ in range(num_layers)
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, num_tokens)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -_INITIAL_RANGE, _INITIAL_RANGE)

    def forward(self, input_ids_NT: torch.Tensor) -> torch.Tensor:
        """Return the logits (N, T, V) of tokens (N, T) int64."""
        hidden_NTH = self.dropout(self.embedding(input_ids_NT))
        for layer in self.layers:
            hidden_NTH = self.dropout(layer(hidden_NTH)[0])
        logits_NTV: torch.Tensor = self.head(hidden_NTH)
        return logits_NTV


def _build(name: str, num_tokens: int) -> nn.Module:
    num_layers, width, dropout, _ = _SIZES[name]
    return LSTMLanguageModel(num_tokens, num_layers, width, dropout)


class Family:
    """The models lstm and, for tests, lstm_tiny."""

    names = tuple(_SIZES)

    @staticmethod
    def spec(name: str) -> LanguageModel:
        """Return the spec of a model in `names`, which builds it with random weights."""
        *_, num_tokens = _SIZES[name]
        return LanguageModel(name, partial(_build, name), num_tokens)
