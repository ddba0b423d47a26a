"""LSTMs as loops: torch_xla would write every step of a sequence into the graph.

Compiling that takes minutes: 64 steps of two small layers are an HLO module of 22,000
instructions. As a loop (`torch_xla.experimental.scan`) it is compiled once for all steps.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Pair = tuple[torch.Tensor, torch.Tensor]


def as_loops(model: nn.Module) -> None:
    """Have the LSTMs of `model` run as loops, where they are plain: no dropout between the layers,
    no projection, one direction."""
    for module in model.modules():
        if (
            type(module) is nn.LSTM
            and not (module.bidirectional or module.proj_size)
            and (module.num_layers == 1 or not module.dropout)
        ):
            module.forward = partial(_forward, module)  # type: ignore[method-assign, has-type]


def _forward(module: nn.LSTM, input: Any, hx: Pair | None = None) -> Any:
    """As `nn.LSTM.forward`; what is no batch, or does not begin at zeros, is left to it."""
    if hx is not None or not isinstance(input, torch.Tensor) or input.dim() != 3:
        return nn.LSTM.forward(module, input, hx)
    hidden_TNH = input.transpose(0, 1) if module.batch_first else input
    last: list[Pair] = []
    for layer in range(module.num_layers):
        hidden_TNH, state = _layer(hidden_TNH, *module.all_weights[layer])
        last.append(state)
    output = hidden_TNH.transpose(0, 1) if module.batch_first else hidden_TNH
    return output, tuple(torch.stack(of_layers) for of_layers in zip(*last, strict=True))


def _layer(
    input_TNC: torch.Tensor, weight_ih: torch.Tensor, weight_hh: torch.Tensor, *biases: torch.Tensor
) -> tuple[torch.Tensor, Pair]:
    from torch_xla.experimental.scan import scan

    bias = sum(biases) if biases else None
    gates_TNG = functional.linear(input_TNC, weight_ih, bias)  # type: ignore[arg-type]
    # What is carried keeps its type, so that under autocast the steps are in the weights' own.
    with torch.autocast("xla", enabled=False):
        gates_TNG = gates_TNG.to(weight_hh.dtype)
        zeros_NH = gates_TNG.new_zeros(gates_TNG.shape[1], weight_hh.shape[1])
        # The weight travels along, for a pure function holds no tensor.
        start = (zeros_NH, zeros_NH.clone(), weight_hh.clone())
        (hidden_NH, cell_NH, _), hidden_TNH = scan(_step, start, gates_TNG, is_fn_pure=True)
    return hidden_TNH, (hidden_NH, cell_NH)


def _step(
    carried: tuple[torch.Tensor, torch.Tensor, torch.Tensor], gates_NG: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """The equations of `torch.nn.LSTM`, whose gates are: enter, forget, new, leave."""
    hidden_NH, cell_NH, weight_hh = carried
    enter, forget, new, leave = (gates_NG + hidden_NH @ weight_hh.t()).chunk(4, dim=1)
    cell_NH = torch.sigmoid(forget) * cell_NH + torch.sigmoid(enter) * torch.tanh(new)
    hidden_NH = torch.sigmoid(leave) * torch.tanh(cell_NH)
    return (hidden_NH, cell_NH, weight_hh), hidden_NH
