"""A small Fourier operator, whose weights are complex, and a plain loop of its training."""

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import accbench


class Spectral(nn.Module):
    """Mixes the channels of the lowest frequencies, by complex weights."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) / width)
        self.phase = nn.Parameter(torch.randn(width, dtype=torch.cfloat))
        self.register_buffer("shift", torch.randn(modes, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, C, L) to (N, C, L)."""
        low = torch.fft.rfft(x)[..., : self.modes]
        mixed = torch.einsum("nim,iom->nom", low, self.weight.conj()) * self.shift
        mixed = mixed + self.phase[:, None] * low.abs()
        return torch.fft.irfft(mixed, n=x.shape[-1])


class Operator(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.lift = nn.Conv1d(3, 4, 1)
        self.spectral = Spectral(4, 5)
        self.head = nn.Linear(4, num_classes)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        x = self.lift(images_NCHW.flatten(2))
        x = functional.gelu(x + self.spectral(x))
        found: torch.Tensor = self.head(x.mean(2))
        return found


def operator(num_classes: int) -> nn.Module:
    """For images of 8 pixels."""
    return Operator(num_classes)


def all_complex(num_classes: int) -> nn.Module:
    """Without any real parameter."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(num_classes, 192, dtype=torch.cfloat) / 14)

        def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
            return (images_NCHW.flatten(1) + 0j).matmul(self.weight.mH).abs()

    return Net()


def loader(num_workers: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 3, 8, 8, generator=generator), torch.arange(24) % 3)
    return DataLoader(data, batch_size=4 // num_workers)


def train(net: Any, optimizer: Any, batches: Any, backward: Any, clip: Any) -> list[float]:
    losses = []
    for images, labels in batches:
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(images), labels)
        backward(loss)
        clip(0.1)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """An own loop through an engine beside the plain one.

    python -m tests.training.fourier ENGINE OPTIMIZER FOLDER
    """
    engine, kind, folder = sys.argv[1:]
    torch.manual_seed(0)
    plain = Operator(3)
    net = copy.deepcopy(plain)
    optimizers = [
        getattr(torch.optim, kind)(model.parameters(), 0.05, weight_decay=0.1)
        for model in (plain, net)
    ]
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    run = accbench.accelerate(
        net, optimizers[1], loader(world_size), engine=engine, device="cpu", tensorboard="off",
        output_dir=folder,
    )  # fmt: skip

    def clip(max_norm: float) -> None:
        for parameter in plain.parameters():
            parameter.grad = parameter.grad.resolve_conj()  # or torch does not clip it
        nn.utils.clip_grad_norm_(plain.parameters(), max_norm)

    expected = train(plain, optimizers[0], loader(1), torch.Tensor.backward, clip)
    losses = train(*run, run.backward, run.clip_grad_norm_)
    weights = dict(plain.named_parameters())
    far = max(
        float(((p.cpu() - weights[name]).norm() / weights[name].norm()).detach())
        for name, p in net.named_parameters()
    )
    found = {"plain": expected, "losses": losses, "far": far}
    Path(f"{folder}-rank{run.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
