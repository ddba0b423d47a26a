"""Autocast under XLA, asked in a process of its own; the last line printed is JSON.

python -m tests.engines.xla_autocast types | keys | beside_float64
"""

import contextlib
import json
import os
import sys

os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from accbench.engines.xla import lazy_import  # noqa: E402
from accbench.engines.xla.autocast import autocast  # noqa: E402

torch_xla = lazy_import.torch_xla()
DEVICE = torch_xla.device()


def types() -> dict:
    """Operation -> the type of its result, of float32 and of bfloat16 operands."""
    images, vectors = torch.randn(2, 4, 8, 8), torch.randn(4, 4)
    weight, kernel = torch.randn(4, 4), torch.randn(4, 4, 3, 3)
    norm = torch.ones(4)
    operations = {
        "conv2d": lambda d, x: F.conv2d(x(images), d(kernel)),
        "linear": lambda d, x: F.linear(x(vectors), d(weight)),
        "matmul": lambda d, x: x(vectors) @ d(weight),
        "attention": lambda d, x: F.scaled_dot_product_attention(*[x(images)] * 3),
        "batch_norm": lambda d, x: F.batch_norm(
            x(images), d(norm), d(norm), d(norm), d(norm), training=True
        ),
        "relu": lambda d, x: F.relu(x(images)),
        "relu in place": lambda d, x: F.relu_(x(images) + 1),
        "max_pool2d": lambda d, x: F.max_pool2d(x(images), 2),
        "layer_norm": lambda d, x: F.layer_norm(x(vectors), (4,), d(norm), d(norm)),
        "softmax": lambda d, x: x(vectors).softmax(1),
        "cross_entropy": lambda d, x: F.cross_entropy(x(vectors), d(torch.arange(4))),
        "sum": lambda d, x: x(vectors).sum(),
        "exp": lambda d, x: x(vectors).exp(),
        "cumsum": lambda d, x: x(vectors).cumsum(0),
        "add": lambda d, x: x(vectors) + 1,
        "cat with float32": lambda d, x: torch.cat([x(vectors), d(weight)]),
    }

    def given(dtype):
        # As from a layer before: it has a gradient.
        return lambda tensor: tensor.to(DEVICE).requires_grad_().to(dtype)

    found = {}
    for name, operation in operations.items():
        with autocast(torch.bfloat16, use_half_ops=True):
            found[name] = [
                str(operation(lambda t: t.to(DEVICE), given(dtype)).dtype).removeprefix("torch.")
                for dtype in (torch.float32, torch.bfloat16)
            ]
    with autocast(torch.bfloat16, use_half_ops=True), torch.autocast("xla", enabled=False):
        found["matmul, autocast off"] = str((vectors.to(DEVICE) @ weight.to(DEVICE)).dtype)
    found["matmul, outside"] = str((vectors.to(DEVICE) @ weight.to(DEVICE)).dtype)
    found["on the host"] = str((vectors @ weight).dtype)
    return found


def program_of_a_step(keys: contextlib.AbstractContextManager) -> str:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.LayerNorm(32), nn.Linear(32, 4), nn.GELU(),
    ).to(DEVICE)  # fmt: skip
    images = torch.randn(2, 3, 10, 10).to(DEVICE)
    torch_xla.sync()
    with keys:
        with autocast(torch.float16, use_half_ops=True):
            loss = net(images).float().square().mean()
        loss.backward()
    return torch_xla._XLAC._get_xla_tensors_hlo([loss, *(p.grad for p in net.parameters())])


def keys() -> dict:
    """The same step as it is, and with the key that tensors have on XLA:CUDA."""
    cuda = torch._C._IncludeDispatchKeyGuard(torch._C.DispatchKey.AutocastCUDA)
    plain, on_cuda = (program_of_a_step(guard) for guard in (contextlib.nullcontext(), cuda))
    return {"equal": plain == on_cuda, "lines": plain.count("\n"), "f16": plain.count("f16[")}


def beside_float64() -> dict:
    """Largest difference of results and gradients, relative to the largest value, a case."""
    relu, pool = nn.ReLU, nn.MaxPool2d
    cases = {
        "bn": ([nn.BatchNorm2d(6)], (5, 6, 7, 9)),
        "bn relu": ([nn.BatchNorm2d(6), relu()], (5, 6, 7, 9)),
        "bn relu in place": ([nn.BatchNorm2d(6), relu(True)], (5, 6, 7, 9)),
        "bn1d of vectors": ([nn.BatchNorm1d(6), relu()], (16, 6)),
        "bn1d of sequences": ([nn.BatchNorm1d(6), relu()], (4, 6, 11)),
        "bn3d": ([nn.BatchNorm3d(6), relu()], (3, 6, 3, 5, 4)),
        "bn without weights": ([nn.BatchNorm2d(6, affine=False), relu()], (5, 6, 7, 9)),
        "bn without averages": (
            [nn.BatchNorm2d(6, track_running_stats=False), relu()], (5, 6, 7, 9),
        ),
        "relu alone": ([relu()], (4, 6, 5, 5)),
        "bn, written to, relu": ([nn.BatchNorm2d(6), Shifted(), relu()], (5, 6, 7, 9)),
        "bn used twice": ([Twice()], (5, 6, 7, 9)),
        "pool 3 2 1": ([pool(3, 2, 1)], (3, 4, 12, 13)),
        "pool 2": ([pool(2)], (3, 4, 9, 8)),
        "pool overlapping": ([pool(3, 1, 1)], (2, 4, 6, 7)),
        "pool with gaps": ([pool(2, 3)], (2, 4, 11, 8)),
        "pool of two sizes": ([pool((3, 2), (2, 1), (1, 0))], (2, 4, 9, 8)),
        "pool to the ceiling": ([pool(3, 2, ceil_mode=True)], (2, 4, 8, 8)),
        "attention": ([Attention()], (2, 3, 7, 8)),
        "attention, scaled": ([Attention(scale=0.3)], (2, 3, 7, 8)),
        "attention, causal": ([Attention(is_causal=True)], (2, 3, 7, 8)),
        "attention of three dimensions": ([Attention()], (3, 7, 8)),
        # Whose bias has a gradient of many terms.
        "linear": ([nn.Linear(6, 5)], (2048, 6)),
        "linear of three dimensions": ([nn.Linear(6, 5), nn.Linear(5, 4)], (32, 64, 6)),
        "linear without bias": ([nn.Linear(6, 5, bias=False)], (8, 6)),
        "convolution": ([nn.Conv2d(6, 5, 3), nn.Conv2d(5, 4, 1)], (16, 6, 16, 16)),
        "convolution of one dimension": ([nn.Conv1d(6, 5, 3)], (16, 6, 256)),
        "sum over a batch": ([Moved()], (2048, 6)),
        "stem": ([nn.BatchNorm2d(6), relu(True), pool(3, 2, 1)], (4, 6, 12, 12)),
    }  # fmt: skip
    found = {}
    for name, (modules, shape) in cases.items():
        # On a CPU XLA's convolutions add float16 up in float16.
        types = (torch.bfloat16,) if "convolution" in name else (torch.float16, torch.bfloat16)
        for dtype in types:
            found[f"{name}, {dtype}"] = worst(nn.Sequential(*modules), shape, dtype)
    return found


class Attention(nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.how = how

    def forward(self, x):
        return F.scaled_dot_product_attention(x, 0.5 * x, x * x, **self.how)


class Shifted(nn.Module):
    def forward(self, x):
        x += 0.25
        return x


class Moved(nn.Module):
    """By a vector, whose gradient is a sum over the batch."""

    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.zeros(6))

    def forward(self, x):
        return x * (x + self.by.to(x.dtype))


class Twice(nn.Module):
    """BatchNorm's result goes on through a ReLU and beside it."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x):
        y = self.norm(x)
        return F.relu(y) + 0.5 * y


def worst(net: nn.Module, shape, dtype) -> float:
    torch.manual_seed(1)
    # Few values, so that windows have ties; and exact in 16 bits.
    given = (torch.randint(-6, 7, shape) / 4).to(dtype)
    for parameter in net.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    exact = outcome(net.cpu().double(), given.double(), None)
    through_xla = outcome(net.float().to(DEVICE), given.to(DEVICE), dtype)
    differences = [
        float((a - b).abs().max() / b.abs().max().clamp(min=1e-6))
        for a, b in zip(through_xla, exact, strict=True)
    ]
    return max(differences)


def outcome(net: nn.Module, given: torch.Tensor, dtype) -> list[torch.Tensor]:
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.reset_running_stats()
    given = given.clone().requires_grad_()
    with autocast(dtype, use_half_ops=True) if dtype else contextlib.nullcontext():
        out = net(given * 1)
    torch.manual_seed(2)
    weights = (torch.randint(-4, 5, out.shape) / 4).to(out.device).to(out.dtype)
    (out * weights).sum().backward()
    means = [b for n, b in net.named_buffers() if n.endswith("running_mean")]
    found = [out, given.grad, *(p.grad for p in net.parameters()), *means]
    result = [tensor.detach().cpu().double() for tensor in found]
    net.zero_grad()
    return result


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
