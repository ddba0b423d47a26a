"""Recurrent layers as loops: torch_xla would write every step of a sequence into the graph.

Compiling that takes minutes: 64 steps of two small LSTMs are an HLO module of 22,000
instructions. As a loop (`torch_xla.experimental.scan`) it is compiled once for all steps.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from accbench.engines.xla.kernels import registration

States = tuple[torch.Tensor, ...]
# Carried from step to step: hidden states, then the weight and the bias of what they give.
Carried = tuple[torch.Tensor, ...]


@cache
def replace_kernels() -> None:
    """For all that is computed on XLA's device in this process.

    torch_xla 2.8 puts a packed sequence's sizes on the device, where no layer can read them.
    """
    registration.replace({"_pack_padded_sequence": _pack}, "AutogradXLA")


def _pack(
    input: torch.Tensor, lengths: torch.Tensor, batch_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = lengths.cpu()
    length, num = (input.shape[1], input.shape[0]) if batch_first else input.shape[:2]
    # Also for its refusals.
    _, sizes = torch._VF._pack_padded_sequence(torch.empty(length, num), lengths, False)
    rows = [(step, of) for step, size in enumerate(sizes.tolist()) for of in range(size)]
    places = [of * length + step if batch_first else step * num + of for step, of in rows]
    return input.flatten(0, 1).index_select(0, torch.tensor(places).to(input.device)), sizes


def as_loops(model: nn.Module) -> None:
    """Have the LSTMs, GRUs and RNNs of `model` run as loops, those without projections."""
    for module in model.modules():
        if type(module) in (nn.LSTM, nn.GRU, nn.RNN) and not module.proj_size:
            module.forward = partial(_forward, module)


def _forward(module: Any, input: Any, hx: Any = None) -> Any:
    """As the module's own, to which packed sequences and wrong sizes are left."""
    if not isinstance(input, torch.Tensor) or input.dim() not in (2, 3):
        return type(module).forward(module, input, hx)
    batched = input.dim() == 3
    if not batched:
        input = input.unsqueeze(0 if module.batch_first else 1)
    hidden_TNC = input.transpose(0, 1) if module.batch_first else input
    given = _given(module, hx, batched, hidden_TNC)
    if given is None:
        return type(module).forward(module, input if batched else input.squeeze(1), hx)
    last: list[States] = []
    num_ways = 2 if module.bidirectional else 1
    for layer in range(module.num_layers):
        ways = []
        for way in range(num_ways):
            index = layer * num_ways + way
            sequence = hidden_TNC.flip(0) if way else hidden_TNC
            output, states = _layer(
                module, sequence, tuple(state[index] for state in given), module.all_weights[index]
            )
            ways.append(output.flip(0) if way else output)
            last.append(states)
        hidden_TNC = torch.cat(ways, -1) if module.bidirectional else ways[0]
        if module.dropout and layer < module.num_layers - 1:
            hidden_TNC = functional.dropout(hidden_TNC, module.dropout, module.training)
    output = hidden_TNC.transpose(0, 1) if module.batch_first else hidden_TNC
    ends = tuple(torch.stack(of_layers) for of_layers in zip(*last, strict=True))
    if not batched:
        output = output.squeeze(0 if module.batch_first else 1)
        ends = tuple(end.squeeze(1) for end in ends)
    return output, ends if isinstance(module, nn.LSTM) else ends[0]


def _given(module: Any, hx: Any, batched: bool, input_TNC: torch.Tensor) -> States | None:
    """The states (layers * ways, N, hidden) that it begins with; None if they are not such."""
    num_states = 2 if isinstance(module, nn.LSTM) else 1
    num = module.num_layers * (2 if module.bidirectional else 1)
    shape = (num, input_TNC.shape[1], module.hidden_size)
    if input_TNC.shape[2] != module.input_size or not len(input_TNC):
        return None
    if hx is None:
        return tuple(input_TNC.new_zeros(shape) for _ in range(num_states))
    states = tuple(hx) if isinstance(hx, (tuple, list)) else (hx,)
    if not batched:
        states = tuple(state.unsqueeze(1) for state in states)
    return states if [state.shape for state in states] == [shape] * num_states else None


def _layer(
    module: Any, input_TNC: torch.Tensor, states: States, weights: Any
) -> tuple[torch.Tensor, States]:
    from torch_xla.experimental.scan import scan

    weight_ih, weight_hh, *biases = weights
    bias_ih, bias_hh = biases or (None, None)
    step = _STEPS[module.mode]
    if bias_ih is not None and step is not _gru:  # where it is not added to the gates as it is
        bias_ih, bias_hh = bias_ih + bias_hh, None
    gates_TNG = functional.linear(input_TNC, weight_ih, bias_ih)
    # What is carried keeps its type, so that under autocast the steps are in the weights' own.
    with torch.autocast("xla", enabled=False):
        gates_TNG = gates_TNG.to(weight_hh.dtype)
        if bias_hh is None:
            bias_hh = weight_hh.new_zeros(len(weight_hh))
        # Weights travel along, for a pure function holds no tensor.
        start = (*(state.to(weight_hh.dtype) for state in states), weight_hh, bias_hh)
        start = tuple(tensor.clone() for tensor in start)
        end, hidden_TNH = scan(step, start, gates_TNG, is_fn_pure=True)
    return hidden_TNH, end[: len(states)]


# The equations of `torch.nn.LSTM`, `GRU` and `RNN`; gates are those of the input and its bias.


def _lstm(carried: Carried, gates_NG: torch.Tensor) -> tuple[Carried, torch.Tensor]:
    hidden_NH, cell_NH, weight_hh, bias_hh = carried
    enter, forget, new, leave = (gates_NG + hidden_NH @ weight_hh.t()).chunk(4, dim=1)
    cell_NH = torch.sigmoid(forget) * cell_NH + torch.sigmoid(enter) * torch.tanh(new)
    hidden_NH = torch.sigmoid(leave) * torch.tanh(cell_NH)
    return (hidden_NH, cell_NH, weight_hh, bias_hh), hidden_NH


def _gru(carried: Carried, gates_NG: torch.Tensor) -> tuple[Carried, torch.Tensor]:
    hidden_NH, weight_hh, bias_hh = carried
    reset, update, new = gates_NG.chunk(3, dim=1)
    of_reset, of_update, of_new = (hidden_NH @ weight_hh.t() + bias_hh).chunk(3, dim=1)
    part = torch.sigmoid(update + of_update)
    new = torch.tanh(new + torch.sigmoid(reset + of_reset) * of_new)
    hidden_NH = new + part * (hidden_NH - new)
    return (hidden_NH, weight_hh, bias_hh), hidden_NH


def _rnn(
    carried: Carried, gates_NG: torch.Tensor, of: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Carried, torch.Tensor]:
    hidden_NH, weight_hh, bias_hh = carried
    hidden_NH = of(gates_NG + hidden_NH @ weight_hh.t())
    return (hidden_NH, weight_hh, bias_hh), hidden_NH


def _rnn_tanh(carried: Carried, gates_NG: torch.Tensor) -> tuple[Carried, torch.Tensor]:
    return _rnn(carried, gates_NG, torch.tanh)


def _rnn_relu(carried: Carried, gates_NG: torch.Tensor) -> tuple[Carried, torch.Tensor]:
    return _rnn(carried, gates_NG, torch.relu)


_STEPS: dict[str, Callable[[Carried, torch.Tensor], tuple[Carried, torch.Tensor]]] = {
    "LSTM": _lstm, "GRU": _gru, "RNN_TANH": _rnn_tanh, "RNN_RELU": _rnn_relu,
}  # fmt: skip
