"""Windows of a max-pooling: the position of each window's maximum, and the gradient's way back."""

import torch
from torch.nn import functional

from accbench.engines.xla_common.scalars import scalar_like


class PoolWindows:
    """The windows of a 2-d pooling in its padded input; positions count row by row."""

    def __init__(
        self, size: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int],
        shape: torch.Size,
    ) -> None:  # fmt: skip
        self.size, self.stride, self.padding, self.shape = size, stride, padding, shape
        self.num_positions = size[0] * size[1]
        self.padded = [length + 2 * pad for length, pad in zip(shape[2:], padding, strict=True)]
        self.num_windows = [
            (length - width) // step + 1
            for length, width, step in zip(self.padded, size, stride, strict=True)
        ]

    def slices_at(self, position: int) -> list[tuple[int, int, int]]:
        """Return (start, end, step) of the rows and columns at a position of all windows."""
        offsets = divmod(position, self.size[1])
        return [
            (offset, offset + step * (windows - 1) + 1, step)
            for offset, step, windows in zip(offsets, self.stride, self.num_windows, strict=True)
        ]

    def max_and_position(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each window's maximum and its position.

        The position is the first maximum, as in torch, or a NaN. It is found by comparing, and not
        as what equals the maximum: XLA may compute the input twice, and round differently.

        Args:
            batch: (N, C, H, W).

        Returns:
            Maxima (N, C, windows down, windows across), and their positions, uint8.
        """
        top, left = self.padding
        padded = functional.pad(batch, (left, left, top, top), value=float("-inf"))
        maximum = winners = None
        for position in range(self.num_positions):
            rows, columns = self.slices_at(position)
            candidates = padded[:, :, slice(*rows), slice(*columns)]
            if maximum is None or winners is None:
                maximum, winners = candidates, torch.zeros_like(candidates, dtype=torch.uint8)
                continue
            better = (candidates > maximum) | (candidates != candidates)
            maximum = torch.where(better, candidates, maximum)
            winners = torch.where(better, torch.full_like(winners, position), winners)
        assert winners is not None
        return torch.max_pool2d(batch, self.size, self.stride, self.padding), winners

    def input_gradient(self, gradient: torch.Tensor, winners: torch.Tensor) -> torch.Tensor:
        """Compute the gradient of the pooled input, in float32.

        Args:
            gradient: for each window's maximum, (N, C, windows down, windows across).
            winners: the positions that `max_and_position` returned.
        """
        num_samples, channels, height, width = self.shape
        num_rows, (padded_height, padded_width) = gradient.shape[2], self.padded
        gradient_float, total = gradient.float(), None
        for position in range(self.num_positions):
            rows, columns = self.slices_at(position)
            part = torch.where(
                winners == scalar_like(position, winners),
                gradient_float,
                scalar_like(0, gradient_float),
            )
            # The gradient of a strided slice, which XLA computes as interior padding.
            part = torch.ops.aten.slice_backward(
                part, [num_samples, channels, num_rows, padded_width], 3, *columns
            )
            part = torch.ops.aten.slice_backward(
                part, [num_samples, channels, padded_height, padded_width], 2, *rows
            )
            total = part if total is None else total + part
        assert total is not None
        top, left = self.padding
        return total[:, :, top : top + height, left : left + width]
