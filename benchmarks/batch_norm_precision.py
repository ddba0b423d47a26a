"""How far BatchNorm is from float64's where a channel's mean is large beside its deviation.

    PJRT_DEVICE=CPU python benchmarks/batch_norm_precision.py

Of (2, 16, 2, 2) values, 8 a channel, in float32 by torch and by torch_xla: the relative distance of
the output and of the input's gradient. Prints Markdown.
"""

import torch
import torch_xla
from torch.nn import functional

MEANS = (0, 3, 10, 30, 100)  # in deviations


def normalised(
    batch: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, gradient of the batch), float64 on the host."""
    batch = batch.detach().requires_grad_()
    output = functional.batch_norm(batch, None, None, weight, bias, training=True)
    output.backward(gradient)
    assert batch.grad is not None
    return output.detach().cpu().double(), batch.grad.cpu().double()


def main() -> None:
    # Before anything is differentiated, for autograd has a thread a device that it knows then.
    devices = (torch.device("cpu"), torch_xla.device())
    torch.manual_seed(0)
    print("| mean, deviations | torch | torch_xla |\n| --- | --- | --- |")
    for mean in MEANS:
        given = [torch.randn(2, 16, 2, 2) + mean, torch.ones(16), torch.zeros(16)]
        given.append(torch.randn(2, 16, 2, 2))
        exact = normalised(*(tensor.double() for tensor in given))
        cells = []
        for device in devices:
            found = normalised(*(tensor.to(device) for tensor in given))
            pairs = zip(found, exact, strict=True)
            cells.append(", ".join(f"{(a - b).norm() / b.norm():.0e}" for a, b in pairs))
        print(f"| {mean} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
