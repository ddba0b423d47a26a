"""A small Fourier operator, whose weights are complex, and a plain loop of its training."""

import torch
from torch import nn
from torch.nn import functional


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
