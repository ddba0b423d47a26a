"""Windows of a max-pooling: which place of each is the largest, and the way back."""

import torch
from torch.nn import functional

from accbench.engines.xla_common.scalars import number


class Windows:
    """Where the windows of a pooling lie in its padded input; places count row by row."""

    def __init__(
        self, size: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int],
        shape: torch.Size,
    ) -> None:  # fmt: skip
        self.size, self.stride, self.padding, self.shape = size, stride, padding, shape
        self.num_places = size[0] * size[1]
        self.padded = [length + 2 * more for length, more in zip(shape[2:], padding, strict=True)]
        self.num_windows = [
            (length - places) // step + 1
            for length, places, step in zip(self.padded, size, stride, strict=True)
        ]

    def seen_by(self, place: int) -> list[tuple[int, int, int]]:
        """(start, end, step) of rows and of columns that this place of all windows sees."""
        offsets = divmod(place, self.size[1])
        return [
            (offset, offset + step * (windows - 1) + 1, step)
            for offset, step, windows in zip(offsets, self.stride, self.num_windows, strict=True)
        ]

    def largest(self, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest of each window, and the place that has it first, as in torch, or a NaN.

        The place is found anew, and not as what equals the largest: XLA may compute what was given
        twice, and round otherwise.
        """
        above, left = self.padding
        padded = functional.pad(given, (left, left, above, above), value=float("-inf"))
        most = won = None
        for place in range(self.num_places):
            rows, columns = self.seen_by(place)
            seen = padded[:, :, slice(*rows), slice(*columns)]
            if most is None or won is None:
                most, won = seen, torch.zeros_like(seen, dtype=torch.uint8)
                continue
            better = (seen > most) | (seen != seen)
            most = torch.where(better, seen, most)
            won = torch.where(better, torch.full_like(won, place), won)
        assert won is not None
        return torch.max_pool2d(given, self.size, self.stride, self.padding), won

    def spread(self, gradient: torch.Tensor, won: torch.Tensor) -> torch.Tensor:
        """The gradient of what was pooled, in float32, from that of each window's largest."""
        num, channels, height, width = self.shape
        num_rows, (padded_height, padded_width) = gradient.shape[2], self.padded
        wide, total = gradient.float(), None
        for place in range(self.num_places):
            rows, columns = self.seen_by(place)
            share = torch.where(won == number(place, won), wide, number(0, wide))
            # The reverse of taking a slice: XLA has it as padding between elements.
            share = torch.ops.aten.slice_backward(
                share, [num, channels, num_rows, padded_width], 3, *columns
            )
            share = torch.ops.aten.slice_backward(
                share, [num, channels, padded_height, padded_width], 2, *rows
            )
            total = share if total is None else total + share
        assert total is not None
        above, left = self.padding
        return total[:, :, above : above + height, left : left + width]
