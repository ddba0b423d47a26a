"""Videos, and what tells their next frame (Shi et al., Convolutional LSTM Network, 2015)."""

import dataclasses
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from accbench.models.spec import Spec

# name -> (channels of the layers, from the input on; frames, the paper's 10 and 10)
_SIZES = {"convlstm": ((128, 64, 64), 20), "convlstm_tiny": ((8, 8), 6)}
_KERNEL = 5
# Of the moving squares, as parts of the image.
_SQUARE, _MAX_STEP = 0.25, 0.1
_NUM_SQUARES = 2


class ConvLSTMCell(nn.Module):
    """One layer, one step: the paper's equation 3, peepholes (one weight a channel) included."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.gates = nn.Conv2d(in_channels + channels, 4 * channels, _KERNEL, padding=_KERNEL // 2)
        self.peepholes = nn.Parameter(torch.zeros(3, channels, 1, 1))

    def forward(
        self, input_NCHW: torch.Tensor, hidden_NCHW: torch.Tensor, cell_NCHW: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden state, cell state) after the step, from those before it."""
        gates = self.gates(torch.cat([input_NCHW, hidden_NCHW], dim=1))
        enter, forget, new, leave = gates.chunk(4, dim=1)
        of_enter, of_forget, of_leave = self.peepholes.unbind()
        kept = torch.sigmoid(forget + of_forget * cell_NCHW) * cell_NCHW
        cell_NCHW = kept + torch.sigmoid(enter + of_enter * cell_NCHW) * torch.tanh(new)
        hidden_NCHW = torch.sigmoid(leave + of_leave * cell_NCHW) * torch.tanh(cell_NCHW)
        return hidden_NCHW, cell_NCHW


class ConvLSTM(nn.Module):
    """Layers of cells over the frames, and a 1 x 1 convolution over what they hold."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        inputs = (1, *widths[:-1])
        self.cells = nn.ModuleList(
            ConvLSTMCell(*sizes) for sizes in zip(inputs, widths, strict=True)
        )
        self.head = nn.Conv2d(sum(widths), 1, 1)
        self.widths = widths

    def forward(self, video_NTCHW: torch.Tensor) -> torch.Tensor:
        """Frames (N, T, 1, H, W) in 0..1 to logits of those that follow, of the same shape."""
        num, num_frames, _, height, width = video_NTCHW.shape
        states = [
            (zeros, zeros)
            for channels in self.widths
            for zeros in [video_NTCHW.new_zeros(num, channels, height, width)]
        ]
        told = []
        for frame in range(num_frames):
            below_NCHW = video_NTCHW[:, frame]
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(below_NCHW, *states[layer])
                below_NCHW = states[layer][0]
            told.append(self.head(torch.cat([hidden for hidden, _ in states], dim=1)))
        return torch.stack(told, dim=1)


@dataclasses.dataclass(frozen=True)
class NextFrames(Spec):
    """Videos (N, T, 1, H, W) uint8: each frame is to be told from those before it."""

    takes: ClassVar = "videos"
    unit: ClassVar = "frames"
    usual_num_classes: ClassVar = 1
    name: str
    widths: tuple[int, ...]
    num_frames: int
    """Of a video, the first included, which is not told."""
    image_size: int = 64
    """Height and width in pixels."""

    @property
    def units_per_sample(self) -> int:
        """Frames."""
        return self.num_frames

    def build(self, num_classes: int) -> nn.Module:
        """The model on the host; there are no classes."""
        return ConvLSTM(self.widths)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Cross-entropy of brightness, mean over pixels and frames, as in the paper."""
        dtype = next(model.parameters()).dtype
        video_NTCHW = batch.to(dtype) / 255
        logits_NTCHW = model(video_NTCHW[:, :-1])
        return functional.binary_cross_entropy_with_logits(
            logits_NTCHW.to(dtype), video_NTCHW[:, 1:]
        )

    def synthetic_batch(self, batch_size: int, num_classes: int, generator: torch.Generator) -> Any:
        """Bright squares that move straight on and come in again at the other side."""
        size = self.image_size
        square = max(1, int(_SQUARE * size))

        def places(low: float, high: float) -> torch.Tensor:  # of all squares, (N, S, 1, 1)
            shape = (batch_size, _NUM_SQUARES, 1, 1)
            return low + (high - low) * torch.rand(shape, generator=generator)

        frames_T1, pixels = torch.arange(self.num_frames).view(-1, 1), torch.arange(size)
        covered = []
        for _ in ("rows", "columns"):
            begin = places(0, size) + places(-_MAX_STEP, _MAX_STEP) * size * frames_T1
            covered.append((pixels - begin.floor()) % size < square)  # (N, S, T, size)
        rows, columns = covered
        bright_NTHW = (rows.unsqueeze(-1) & columns.unsqueeze(-2)).any(dim=1)
        return (255 * bright_NTHW.to(torch.uint8)).unsqueeze(2)


class Family:
    """convlstm and, for CPUs, convlstm_tiny."""

    names = tuple(_SIZES)

    @staticmethod
    def spec(name: str) -> NextFrames:
        """One of `names`, with random weights."""
        return NextFrames(name, *_SIZES[name])
