"""How far norms are from float64's where the mean is large beside the deviation.

    PJRT_DEVICE=CPU python benchmarks/research/norm_precision.py

BatchNorm, LayerNorm and GroupNorm in float32 by torch, by torch_xla as it is, and by it as the
engine xla has it, on a CPU and, lean, on a GPU: the relative distance of the output and of the
input's gradient. Prints Markdown.
"""

import torch
import torch_xla
from torch.nn import functional

from accbench.engines.xla.kernels import norms

MEANS = (0, 3, 10, 30, 100)  # in deviations
CASES = {
    "BatchNorm, 8 values": (
        lambda given: functional.batch_norm(given, None, None, training=True), (2, 16, 2, 2),
    ),
    "LayerNorm, 64 values": (lambda given: functional.layer_norm(given, (64,)), (4, 8, 64)),
    "GroupNorm, 64 values": (lambda given: functional.group_norm(given, 4), (4, 16, 4, 4)),
}  # fmt: skip


def normalised(norm, given: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(output, gradient of what is given), float64 on the host."""
    given = given.detach().requires_grad_()
    output = norm(given)
    output.backward(gradient)
    return output.detach().cpu().double(), given.grad.cpu().double()


def distances(device: torch.device) -> dict[tuple[str, int], str]:
    """(case, mean) -> the two distances."""
    torch.manual_seed(0)
    cells = {}
    for name, (norm, shape) in CASES.items():
        for mean in MEANS:
            given = (torch.randn(shape) + mean, torch.randn(shape))
            exact = normalised(norm, *(tensor.double() for tensor in given))
            found = normalised(norm, *(tensor.to(device) for tensor in given))
            pairs = zip(found, exact, strict=True)
            cells[name, mean] = ", ".join(f"{(a - b).norm() / b.norm():.0e}" for a, b in pairs)
    return cells


def main() -> None:
    # Before anything is differentiated, for autograd has a thread a device that it knows then.
    device = torch_xla.device()
    columns = [distances(torch.device("cpu")), distances(device)]
    for lean in (False, True):
        norms.replace_kernels(lean)
        columns.append(distances(device))
    print(
        "| norm | mean, deviations | torch | torch_xla | engine xla |\n| --- | --- |" + " --- |" * 3
    )
    for name, mean in columns[0]:
        cells = " | ".join(column[name, mean] for column in columns)
        print(f"| {name} | {mean} | {cells} |")


if __name__ == "__main__":
    main()
