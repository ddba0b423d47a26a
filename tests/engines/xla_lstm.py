"""In a process of its own: LSTMs through XLA beside torch's; prints JSON of what differs."""

import json

import torch
from torch import nn

from accbench.engines.xla import importing, lstm

torch_xla = importing.torch_xla()
device = torch_xla.device()  # before anything is differentiated


def results(net: nn.LSTM, input: torch.Tensor, where: torch.device) -> list[torch.Tensor]:
    """Output, last states and gradients, of the input too."""
    net, input = net.to(where), input.detach().to(where).requires_grad_()
    output, (hidden, cell) = net(input)
    (output.square().sum() + hidden.sum() + cell.square().sum()).backward()
    found = [output, hidden, cell, input.grad, *(p.grad for p in net.parameters())]
    found = [tensor.detach().cpu() for tensor in found]
    net.zero_grad()
    return found


def main() -> None:
    far, names = {}, {
        "two layers": {"num_layers": 2},
        "batch first": {"batch_first": True},
        "no bias": {"bias": False},
        "both ways": {"bidirectional": True},  # left to torch_xla
    }  # fmt: skip
    for name, options in names.items():
        torch.manual_seed(0)
        net, input = nn.LSTM(5, 4, **options), torch.randn(6, 3, 5)
        expected = results(net, input, torch.device("cpu"))
        lstm.as_loops(net)
        got = results(net, input, device)
        far[name] = max(
            float((a - b).norm() / a.norm()) for a, b in zip(expected, got, strict=True)
        )
    net = nn.LSTM(5, 4).to(device)
    lstm.as_loops(net)
    sizes = []
    for length in (6, 60):
        output, _ = net(torch.randn(length, 3, 5).to(device))
        sizes.append(len(torch_xla._XLAC._get_xla_tensors_hlo([output]).splitlines()))
    print(json.dumps({"far": far, "sizes": sizes}))


main()
