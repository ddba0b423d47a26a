"""Next-frame prediction in videos (Shi et al., Convolutional LSTM Network, 2015)."""

import dataclasses
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from accbench.models.tasks.spec import Spec

# name -> (channels of each layer; frames, in the paper 10 as input and 10 to predict)
_SIZES = {"convlstm": ((128, 64, 64), 20), "convlstm_tiny": ((8, 8), 6)}
_KERNEL = 5
# The moving squares' side and largest step per frame, as fractions of the image's side.
_SQUARE, _MAX_STEP = 0.25, 0.1
_NUM_SQUARES = 2


class ConvLSTMCell(nn.Module):
    """One time step of one layer: the paper's equation 3, with one peephole weight per channel."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.gates = nn.Conv2d(in_channels + channels, 4 * channels, _KERNEL, padding=_KERNEL // 2)
        self.peepholes = nn.Parameter(torch.zeros(3, channels, 1, 1))

    def forward(
        self, input_NCHW: torch.Tensor, hidden_NCHW: torch.Tensor, cell_NCHW: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (hidden state, cell state) after the step."""
        gates = self.gates(torch.cat([input_NCHW, hidden_NCHW], dim=1))
        in_gate, forget_gate, update, out_gate = gates.chunk(4, dim=1)
        in_weight, forget_weight, out_weight = self.peepholes.unbind()
        old = torch.sigmoid(forget_gate + forget_weight * cell_NCHW) * cell_NCHW
        new = torch.sigmoid(in_gate + in_weight * cell_NCHW) * torch.tanh(update)
        cell_NCHW = old + new
        hidden_NCHW = torch.sigmoid(out_gate + out_weight * cell_NCHW) * torch.tanh(cell_NCHW)
        return hidden_NCHW, cell_NCHW


class ConvLSTM(nn.Module):
    """Stacked ConvLSTM layers over the frames, and a 1 x 1 convolution over all hidden states."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        inputs = (1, *widths[:-1])
        self.cells = nn.ModuleList(
            ConvLSTMCell(*sizes) for sizes in zip(inputs, widths, strict=True)
        )
        self.head = nn.Conv2d(sum(widths), 1, 1)
        self.widths = widths

    def forward(self, video_NTCHW: torch.Tensor) -> torch.Tensor:
        """Return the logits of each next frame, (N, T, 1, H, W) as the video, which is in 0..1."""
        num, num_frames, _, height, width = video_NTCHW.shape
        states = [
            (zeros, zeros)
            for channels in self.widths
            for zeros in [video_NTCHW.new_zeros(num, channels, height, width)]
        ]
        logits = []
        for frame in range(num_frames):
            layer_input_NCHW = video_NTCHW[:, frame]
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(layer_input_NCHW, *states[layer])
                layer_input_NCHW = states[layer][0]
            logits.append(self.head(torch.cat([hidden for hidden, _ in states], dim=1)))
        return torch.stack(logits, dim=1)


@dataclasses.dataclass(frozen=True)
class NextFrames(Spec):
    """A predictor of each frame from the frames before it; videos are (N, T, 1, H, W) uint8."""

    takes: ClassVar = "videos"
    unit: ClassVar = "frames"
    usual_num_classes: ClassVar = 1
    name: str
    widths: tuple[int, ...]
    num_frames: int
    """Frames of a video, including the first, which is not predicted."""
    image_size: int = 64
    """Height and width in pixels."""

    @property
    def units_per_sample(self) -> int:
        """Number of frames in a video."""
        return self.num_frames

    def build(self, num_classes: int) -> nn.Module:
        """Build the model on the host; `num_classes` is ignored."""
        return ConvLSTM(self.widths)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Compute the paper's cross-entropy of brightness, its mean over pixels and frames."""
        dtype = next(model.parameters()).dtype
        video_NTCHW = batch.to(dtype) / 255
        logits_NTCHW = model(video_NTCHW[:, :-1])
        return functional.binary_cross_entropy_with_logits(
            logits_NTCHW.to(dtype), video_NTCHW[:, 1:]
        )

    def synthetic_batch(self, batch_size: int, num_classes: int, generator: torch.Generator) -> Any:
        """Return videos of bright squares that move straight on and wrap around at the edges."""
        size = self.image_size
        square = max(1, int(_SQUARE * size))

        def uniform(low: float, high: float) -> torch.Tensor:  # one per square, (N, S, 1, 1)
            shape = (batch_size, _NUM_SQUARES, 1, 1)
            return low + (high - low) * torch.rand(shape, generator=generator)

        frames_T1, pixels = torch.arange(self.num_frames).view(-1, 1), torch.arange(size)
        covered = []
        for _ in ("rows", "columns"):
            begin = uniform(0, size) + uniform(-_MAX_STEP, _MAX_STEP) * size * frames_T1
            covered.append((pixels - begin.floor()) % size < square)  # (N, S, T, size)
        rows, columns = covered
        bright_NTHW = (rows.unsqueeze(-1) & columns.unsqueeze(-2)).any(dim=1)
        return (255 * bright_NTHW.to(torch.uint8)).unsqueeze(2)


class Family:
    """The models convlstm and, for CPUs, convlstm_tiny."""

    names = tuple(_SIZES)

    @staticmethod
    def spec(name: str) -> NextFrames:
        """Return the spec of a model in `names`, which builds it with random weights."""
        return NextFrames(name, *_SIZES[name])
