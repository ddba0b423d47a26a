"""Recurrent layers as loops: torch_xla would write every step of a sequence into the graph.

Compiling that takes minutes: 64 steps of two small LSTMs are an HLO module of 22,000
instructions. As a loop (`torch_xla.experimental.scan`) one step is compiled for the whole sequence.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from accbench.engines.xla.kernels import registration

States = tuple[torch.Tensor, ...]
# The loop's carry: hidden states, then the weight and bias of the hidden-to-hidden product.
Carried = tuple[torch.Tensor, ...]


@cache
def replace_kernels() -> None:
    """Register a kernel for packed sequences for XLA's device in this process.

    torch_xla 2.8 puts a packed sequence's sizes on the device, where no layer can read them.
    """
    registration.replace({"_pack_padded_sequence": _pack}, "AutogradXLA")


def _pack(
    input: torch.Tensor, lengths: torch.Tensor, batch_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = lengths.cpu()
    length, num_samples = (input.shape[1], input.shape[0]) if batch_first else input.shape[:2]
    # Called for its error messages, too.
    _, sizes = torch._VF._pack_padded_sequence(torch.empty(length, num_samples), lengths, False)
    pairs = [(step, sample) for step, size in enumerate(sizes.tolist()) for sample in range(size)]
    indices = [
        sample * length + step if batch_first else step * num_samples + sample
        for step, sample in pairs
    ]
    return input.flatten(0, 1).index_select(0, torch.tensor(indices).to(input.device)), sizes


def use_scan(model: nn.Module) -> None:
    """Have the LSTMs, GRUs and RNNs of a model run as loops, except those with projections."""
    for module in model.modules():
        if type(module) in (nn.LSTM, nn.GRU, nn.RNN) and not module.proj_size:
            module.forward = partial(_forward, module)


def _forward(module: Any, input: Any, hx: Any = None) -> Any:
    """Run a layer; its own forward takes packed sequences and wrong sizes."""
    if not isinstance(input, torch.Tensor) or input.dim() not in (2, 3):
        return type(module).forward(module, input, hx)
    is_batched = input.dim() == 3
    if not is_batched:
        input = input.unsqueeze(0 if module.batch_first else 1)
    hidden_TNC = input.transpose(0, 1) if module.batch_first else input
    initial_states = _initial_states(module, hx, is_batched, hidden_TNC)
    if initial_states is None:
        return type(module).forward(module, input if is_batched else input.squeeze(1), hx)
    final_states: list[States] = []
    num_directions = 2 if module.bidirectional else 1
    for layer in range(module.num_layers):
        outputs = []
        for direction in range(num_directions):
            index = layer * num_directions + direction
            sequence = hidden_TNC.flip(0) if direction else hidden_TNC
            output, states = _run_layer(
                module,
                sequence,
                tuple(state[index] for state in initial_states),
                module.all_weights[index],
            )
            outputs.append(output.flip(0) if direction else output)
            final_states.append(states)
        hidden_TNC = torch.cat(outputs, -1) if module.bidirectional else outputs[0]
        if module.dropout and layer < module.num_layers - 1:
            hidden_TNC = functional.dropout(hidden_TNC, module.dropout, module.training)
    output = hidden_TNC.transpose(0, 1) if module.batch_first else hidden_TNC
    stacked_states = tuple(
        torch.stack(layer_states) for layer_states in zip(*final_states, strict=True)
    )
    if not is_batched:
        output = output.squeeze(0 if module.batch_first else 1)
        stacked_states = tuple(state.squeeze(1) for state in stacked_states)
    return output, stacked_states if isinstance(module, nn.LSTM) else stacked_states[0]


def _initial_states(
    module: Any, hx: Any, is_batched: bool, input_TNC: torch.Tensor
) -> States | None:
    """Return the initial states (layers * directions, N, hidden); None if `hx` does not fit."""
    num_states = 2 if isinstance(module, nn.LSTM) else 1
    num_layers = module.num_layers * (2 if module.bidirectional else 1)
    shape = (num_layers, input_TNC.shape[1], module.hidden_size)
    if input_TNC.shape[2] != module.input_size or not len(input_TNC):
        return None
    if hx is None:
        return tuple(input_TNC.new_zeros(shape) for _ in range(num_states))
    states = tuple(hx) if isinstance(hx, (tuple, list)) else (hx,)
    if not is_batched:
        states = tuple(state.unsqueeze(1) for state in states)
    return states if [state.shape for state in states] == [shape] * num_states else None


def _run_layer(
    module: Any, input_TNC: torch.Tensor, states: States, weights: Any
) -> tuple[torch.Tensor, States]:
    from torch_xla.experimental.scan import scan

    weight_ih, weight_hh, *biases = weights
    bias_ih, bias_hh = biases or (None, None)
    step = _STEPS[module.mode]
    if bias_ih is not None and step is not _gru:  # GRU's candidate takes it inside the reset gate
        bias_ih, bias_hh = bias_ih + bias_hh, None
    gates_TNG = functional.linear(input_TNC, weight_ih, bias_ih)
    # A loop's carry keeps its dtype; under autocast the steps compute in the weights' dtype.
    with torch.autocast("xla", enabled=False):
        gates_TNG = gates_TNG.to(weight_hh.dtype)
        if bias_hh is None:
            bias_hh = weight_hh.new_zeros(len(weight_hh))
        # The carry holds the weights, for a pure function may not close over tensors.
        carried = (*(state.to(weight_hh.dtype) for state in states), weight_hh, bias_hh)
        carried = tuple(tensor.clone() for tensor in carried)
        carried_out, hidden_TNH = scan(step, carried, gates_TNG, is_fn_pure=True)
    return hidden_TNH, carried_out[: len(states)]


# The equations of `torch.nn.LSTM`, `GRU` and `RNN`; `gates_NG` come from the input and its bias.


def _lstm(carried: Carried, gates_NG: torch.Tensor) -> tuple[Carried, torch.Tensor]:
    hidden_NH, cell_NH, weight_hh, bias_hh = carried
    input_gate, forget_gate, candidate, output_gate = (gates_NG + hidden_NH @ weight_hh.t()).chunk(
        4, dim=1
    )
    cell_NH = torch.sigmoid(forget_gate) * cell_NH + torch.sigmoid(input_gate) * torch.tanh(
        candidate
    )
    hidden_NH = torch.sigmoid(output_gate) * torch.tanh(cell_NH)
    return (hidden_NH, cell_NH, weight_hh, bias_hh), hidden_NH


def _gru(carried: Carried, gates_NG: torch.Tensor) -> tuple[Carried, torch.Tensor]:
    hidden_NH, weight_hh, bias_hh = carried
    reset_gate, update_gate, candidate = gates_NG.chunk(3, dim=1)
    hidden_reset, hidden_update, hidden_candidate = (hidden_NH @ weight_hh.t() + bias_hh).chunk(
        3, dim=1
    )
    update = torch.sigmoid(update_gate + hidden_update)
    candidate = torch.tanh(candidate + torch.sigmoid(reset_gate + hidden_reset) * hidden_candidate)
    hidden_NH = candidate + update * (hidden_NH - candidate)
    return (hidden_NH, weight_hh, bias_hh), hidden_NH


def _rnn(
    carried: Carried, gates_NG: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Carried, torch.Tensor]:
    hidden_NH, weight_hh, bias_hh = carried
    hidden_NH = activation(gates_NG + hidden_NH @ weight_hh.t())
    return (hidden_NH, weight_hh, bias_hh), hidden_NH


def _rnn_tanh(carried: Carried, gates_NG: torch.Tensor) -> tuple[Carried, torch.Tensor]:
    return _rnn(carried, gates_NG, torch.tanh)


def _rnn_relu(carried: Carried, gates_NG: torch.Tensor) -> tuple[Carried, torch.Tensor]:
    return _rnn(carried, gates_NG, torch.relu)


_STEPS: dict[str, Callable[[Carried, torch.Tensor], tuple[Carried, torch.Tensor]]] = {
    "LSTM": _lstm, "GRU": _gru, "RNN_TANH": _rnn_tanh, "RNN_RELU": _rnn_relu,
}  # fmt: skip
