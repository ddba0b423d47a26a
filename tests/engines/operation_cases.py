"""Operations that engine xla computes by kernels of its own, and others that were wrong once."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional


class Case(NamedTuple):
    """A function of one tensor."""

    name: str
    shape: tuple[int, ...]
    function: Callable[[torch.Tensor], Any]
    stays: bool
    """Whether it must not leave the compiler."""


SHAPES = {1: (2, 3, 13), 2: (2, 3, 9, 11), 3: (2, 2, 5, 6, 7)}
MODES = {
    1: ("nearest", "nearest-exact", "linear"),
    2: ("nearest", "nearest-exact", "bilinear", "bicubic", "area"),
    3: ("nearest", "nearest-exact", "trilinear"),
}
SIZES = (
    {"scale_factor": 1.7}, {"scale_factor": 0.3}, {"scale_factor": 0.6}, {"scale_factor": 1.3},
    {"scale_factor": 2}, {"scale_factor": 0.5}, {"size": 4}, {"size": 16}, {"size": 1},
    {"scale_factor": 1.7, "recompute_scale_factor": True},
)  # fmt: skip


def resized():
    """(name, function) of each interpolation that torch has."""
    for rank, modes in MODES.items():
        for mode, sizes in itertools.product(modes, SIZES):
            mixes = mode.endswith(("linear", "cubic"))
            for corners in (False, True) if mixes else (None,):
                for smooth in (False, True) if rank == 2 and mixes else (False,):
                    said = {"mode": mode, "align_corners": corners, "antialias": smooth, **sizes}

                    def function(x, said=said):
                        return functional.interpolate(x, **said)

                    yield f"interpolate {rank}d {said}", rank, function


def pooled():
    """(name, function) of max-poolings, most with gaps, and of adaptive ones."""
    by_rank = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}
    asked = [*itertools.product((2, 3), (None, 4), (0, 1), (1, 2, 3), (False, True))]
    for rank, said in itertools.product(by_rank, asked):
        size, stride, _, gap, _ = said
        if rank == 3 and (size - 1) * gap + 1 > 5:
            continue  # than the input

        def function(x, pool=by_rank[rank], said=said, indices=stride is None):
            return pool(x, *said, return_indices=indices)

        yield f"max_pool{rank}d {said}", rank, function
    adaptive = {2: functional.adaptive_avg_pool2d, 3: functional.adaptive_avg_pool3d}
    for rank, size in itertools.product(adaptive, (1, 2, 3, 4, 16)):

        def mean(x, pool=adaptive[rank], size=size):
            return pool(x, size)

        yield f"adaptive mean {rank}d {size}", rank, mean
    for axis, size, step in itertools.product((1, -1), (1, 2, 3), (1, 2, 4)):

        def unfold(x, said=(axis, size, step)):
            return x.unfold(*said)

        yield f"unfold {axis} {size} {step}", 2, unfold


def complex_of(x):
    return torch.complex(x, x * x)


def written_into(x, write):
    write(x)
    return x


# Of (5, 3, 4, 4); they may leave the compiler.
OTHERS = {
    "elu": functional.elu,
    "selu in place": lambda x: functional.selu(x + 0, inplace=True),
    "abs": torch.abs,
    "abs of complex": lambda x: complex_of(x).abs(),
    "complex product": lambda x: (complex_of(x) * complex_of(x).conj() ** 2).imag,
    "fft2": lambda x: torch.fft.fft2(x).real,
    "rfft": lambda x: torch.fft.rfft(x).abs(),
    "irfft": lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2, 7),
    "irfft2": lambda x: torch.fft.irfft2(torch.fft.rfft2(x).square(), dim=(1, 2)),
    "stft": lambda x: torch.stft(
        x.flatten(1), 8, window=torch.hann_window(8).to(x.device), return_complex=True
    ).abs(),
    "slogdet": lambda x: torch.linalg.slogdet(x)[1],
    "slogdet's sign": lambda x: torch.linalg.slogdet(x.mT)[0] * x.sum((2, 3)),
    "det": torch.linalg.det,
    "solve": lambda x: torch.linalg.solve(x, x.mT),
    "amax of infinities": lambda x: x.masked_fill(x < 1, -torch.inf).amax(3),
    "amin of infinities": lambda x: x.masked_fill(x > -1, torch.inf).amin((1, 3)),
    "max of infinities": lambda x: (x - torch.inf).max() + x.sum() * 0,
    "min": lambda x: x.min(),
    "logsumexp of infinities": lambda x: x.masked_fill(x < 1, -torch.inf).logsumexp(3).exp(),
    "logsumexp of one": lambda x: (
        x[..., :1].masked_fill(x[..., :1] < 1, -torch.inf).logsumexp(3) + x[..., 0] * 0
    ),
    "batch_norm of given statistics": lambda x: functional.batch_norm(
        x, x[0, :, 0, 0].detach(), x[0, :, 0, 1].detach().abs(), x[0, :, 1, 0], x[0, :, 1, 1]
    ),
    "clamp, broadcast": lambda x: torch.clamp(x[:, :1], max=x[0].detach()),
    "clamp of a column": lambda x: torch.clamp(x[0, 0, 0].unsqueeze(1), min=x[0, 0, 1].detach()),
    **{
        f"diagonal {said}": lambda x, said=said: x.diagonal(*said)
        for said in ((0, 0, 1), (1, 1, 2), (-1, 3, 0), (2, 2, 3), (0, -1, -2))
    },
    "diagonal in place": lambda x: written_into((x + 0), lambda y: y.diagonal(1, 1, 3).mul_(3)),
    "diagonal embedded": lambda x: torch.diag_embed(x, 1, 0, 2),
    "unfold in place": lambda x: written_into((x + 0), lambda y: y.unfold(3, 2, 2).mul_(3)),
    "nll of one": lambda x: functional.cross_entropy(x[0, :, 0, 0], torch.tensor(1).to(x.device)),
    "nll of one, not reduced": lambda x: functional.cross_entropy(
        x[0, :, 0, 0], torch.tensor(2).to(x.device), reduction="none"
    ),
    **{f"pdist {p}": lambda x, p=p: functional.pdist(x.flatten(1), p) for p in (0.0, 1.0, 2.0)},
    **{f"cdist {p}": lambda x, p=p: torch.cdist(x, x[:1] * 2, p) for p in (1.0, 2.0, 3.0)},
    "cdist of other ranks": lambda x: torch.cdist(x, x[0, 0, :2], float("inf")),
    "weight norm": lambda x: torch._weight_norm(x, x[:, :1, :1, :1] + 2, 0),
}


def cases() -> Iterator[Case]:
    for name, rank, function in (*resized(), *pooled()):
        yield Case(name, SHAPES[rank], function, True)
    for name, function in OTHERS.items():
        yield Case(name, (5, 3, 4, 4), function, False)
