"""Interpolation and pooling under engine xla beside torch's own, asked in a process of its own.

    python -m tests.engines.xla_windows

Prints one line of JSON: how many were tried, and those that are not as on the CPU, each in words.
"""

import itertools
import json
import os

os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch  # noqa: E402
from torch.nn import functional  # noqa: E402

from accbench.engines.xla import importing, pooling, recording, resizing  # noqa: E402

DEVICE = importing.torch_xla().device()
resizing.replace_kernels()
pooling.replace_kernels()

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


def outcome(function, x):
    """Results, the gradient, and the results under inference mode."""
    x = x.detach().requires_grad_()
    found = function(x)
    found = found if isinstance(found, tuple) else (found,)
    weights = torch.arange(1.0, found[0].numel() + 1).view(found[0].shape).to(x.device)
    (gradient,) = torch.autograd.grad((found[0] * weights).sum(), x)
    with torch.inference_mode():
        again = function(x.detach().clone())
    again = again if isinstance(again, tuple) else (again,)
    return [tensor.detach().cpu() for tensor in (*found, gradient, *again)]


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    tried, others, num_left = 0, [], recording.num_fallbacks()
    for name, rank, function in (*resized(), *pooled()):
        x = torch.randn(SHAPES[rank], generator=generator)
        if "True)" in name:
            x = x.relu()  # the largest of a window more than once
        wanted, got = outcome(function, x), outcome(function, x.to(DEVICE))
        tried += 1
        same = [a.shape == b.shape and torch.allclose(a, b, 1e-4, 1e-4)
                for a, b in zip(got, wanted, strict=True)]  # fmt: skip
        left = recording.num_fallbacks() - num_left
        num_left += left
        if not all(same) or left:
            others.append(f"{name}: same {same}, {left} left the compiler")
    print(json.dumps({"tried": tried, "others": others}))


if __name__ == "__main__":
    main()
