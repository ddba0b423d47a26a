"""In a process of its own: recurrent layers through XLA beside torch's; prints JSON of what
differs."""

import json
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from accbench.engines.xla import lazy_import
from accbench.engines.xla.kernels import recurrent

KINDS: tuple[Any, ...] = (nn.LSTM, nn.GRU, nn.RNN)
torch_xla = lazy_import.torch_xla()
recurrent.replace_kernels()
device = torch_xla.device()  # before anything is differentiated

OPTIONS: dict[str, Any] = {
    "two layers, batch first": {"num_layers": 2, "batch_first": True},
    "both ways, states given": {"bidirectional": True},
    "no bias, no batch": {"bias": False, "batch_first": True},
}


class Packed(nn.Module):
    """A layer over sequences of 4, 6 and 1 steps."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, input: torch.Tensor) -> Any:
        """(3, 6, C)"""
        packed = pack_padded_sequence(input, torch.tensor([4, 6, 1]), True, enforce_sorted=False)
        output, states = self.layer(packed)
        padded, _ = pad_packed_sequence(output, batch_first=True)
        return padded, states


def tensors_of(results: Any) -> list[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        return [results]
    return [tensor for part in results for tensor in tensors_of(part)]


def results(net: Any, args: tuple[Any, ...], where: torch.device) -> list[torch.Tensor]:
    """Output, last states and gradients, of the inputs too."""
    net = net.to(where)
    args = tuple(
        tuple(t.detach().to(where).requires_grad_() for t in a) if isinstance(a, tuple)
        else a.detach().to(where).requires_grad_()
        for a in args
    )  # fmt: skip
    found = tensors_of(net(*args))
    sum((tensor * tensor.cos()).sum() for tensor in found).backward()
    found += [t.grad for a in args for t in (a if isinstance(a, tuple) else (a,))]
    found = [tensor.detach().cpu() for tensor in (*found, *(p.grad for p in net.parameters()))]
    net.zero_grad()
    return found


def distance(net: Any, *args: Any) -> float:
    """The largest one of a tensor, relative to its norm."""
    expected = results(net, args, torch.device("cpu"))
    recurrent.use_scan(net)
    pairs = zip(expected, results(net, args, device), strict=True)
    return max(float((a - b).norm() / a.norm()) for a, b in pairs)


def main() -> None:
    far = {}
    for kind in KINDS:
        for name, options in OPTIONS.items():
            torch.manual_seed(0)
            net = kind(5, 4, **options)
            args: list[Any] = [torch.randn(6, 5) if "no batch" in name else torch.randn(6, 3, 5)]
            if "states given" in name:
                states = tuple(torch.randn(2, 3, 4) for _ in range(2))
                args.append(states if kind is nn.LSTM else states[0])
            far[f"{kind.__name__}, {name}"] = distance(net, *args)
        net = Packed(kind(5, 4))
        far[f"{kind.__name__}, packed"] = distance(net, torch.randn(3, 6, 5))
    sizes = []
    for kind in KINDS:
        net = kind(5, 4, bidirectional=True).to(device)
        recurrent.use_scan(net)
        of_kind = []
        for length in (6, 60):
            output, _ = net(torch.randn(length, 3, 5).to(device))
            hlo = torch_xla._XLAC._get_xla_tensors_hlo([output])
            of_kind.append(len(hlo.splitlines()))
        sizes.append(of_kind)
    print(json.dumps({"far": far, "sizes": sizes}))


main()
