"""What a step costs with the engine xla's norms, beside torch_xla's own.

    PJRT_DEVICE=CPU NPROC=2 python benchmarks/research/norm_cost.py
        [--models resnet18,resnet50,vit_b_32] [--image_size 96] [--batch_size 8]
        [--steps 20] [--lean]

Forward, backward and SGD in float32 of torchvision's models, a step of the one and a step of the
other in turn, each traced anew, as without replay. Prints Markdown: the median and quartiles of the
ratios of neighbours, with tracing and without it.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torchvision

from accbench.engines.xla.kernels import norms

_ours = True


def switched(name: str, kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    operation = getattr(torch.ops.aten, name).default

    def either(*args: Any) -> torch.Tensor:
        return kernel(*args) if _ours else norms._call_torch(operation, *args)

    return either


def step(net: torch.nn.Module, optimizer: Any, images: Any, labels: Any) -> tuple[float, float]:
    """(seconds of all, seconds of what comes behind the forward and backward pass' tracing)."""
    began = time.perf_counter()
    torch.nn.functional.cross_entropy(net(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    traced = time.perf_counter()
    torch_xla.sync()
    xm.wait_device_ops()
    return time.perf_counter() - began, time.perf_counter() - traced


def main() -> None:
    global _ours
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="resnet18,resnet50,vit_b_32")
    parser.add_argument("--image_size", type=int, default=96)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lean", action="store_true")
    flags = parser.parse_args()
    norms._KERNELS = {name: switched(name, kernel) for name, kernel in norms._KERNELS.items()}
    norms.replace_kernels(flags.lean)
    device = torch_xla.device()
    print("| model | own step, ms | ratio | quartiles | without tracing | quartiles |")
    print("| --- |" + " ---: |" * 5)
    for name in flags.models.split(","):
        torch.manual_seed(0)
        size = {"image_size": flags.image_size} if name.startswith("vit") else {}
        net = torchvision.models.get_model(name, num_classes=10, **size).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        images = torch.randn(flags.batch_size, 3, flags.image_size, flags.image_size).to(device)
        given = (net, optimizer, images, torch.arange(flags.batch_size).remainder(10).to(device))
        torch_xla.sync()
        ratios: list[list[float]] = [[], []]
        own_s = []
        for number in range(-3, flags.steps):  # three that compile
            found = []
            for _ours in (True, False):
                found.append(step(*given))
            if number >= 0:
                own_s.append(found[1][0])
                for of, one, other in zip(ratios, *found, strict=True):
                    of.append(one / other)
        cells = []
        for of in ratios:
            low, median, high = statistics.quantiles(of, n=4)
            cells.append(f"{median:.3f} | {low:.3f} to {high:.3f}")
        print(
            f"| {name} | {1e3 * statistics.median(own_s):.0f} | " + " | ".join(cells) + " |",
            flush=True,
        )


if __name__ == "__main__":
    main()
