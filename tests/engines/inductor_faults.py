"""In a process of its own, which dies where the heap is broken: two faults of torch's inductor.

    python -m tests.engines.inductor_faults CACHE_FOLDER

Prints JSON: how far an evaluation is from eager, and what dropout in place made of its input.
"""

import copy
import json
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

import accbench


class Net(nn.Module):
    """In training BatchNorm, mean and dropout in place; in evaluation the end of a ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 320, 4, 4), nn.Conv2d(3, 320, 4, 4)
        self.scale = nn.Parameter(torch.randn(320, 1, 1))
        self.batch_norm, self.layer_norm = nn.BatchNorm2d(320), nn.LayerNorm(320)
        self.dropout = nn.Dropout(0.25, inplace=True)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(N, 3, 8, 8) to (N, 320)."""
        if self.training:
            return self.dropout(self.batch_norm(self.left(images)).mean([2, 3]))
        pixels = self.left(images) * self.scale + self.right(images)
        return self.layer_norm(pixels.mean([2, 3], keepdim=True).permute(0, 2, 3, 1)).flatten(1)


def main() -> None:
    torch.manual_seed(0)
    plain = Net()
    batches = torch.randn(8, 3, 8, 8)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.0)
    eager = copy.deepcopy(plain)
    model, optimizer, loader = accbench.accelerate(
        plain, optimizer, DataLoader(batches, batch_size=2), engine="inductor", amp_level="O0",
        device="cpu", inductor={"cache_dir": sys.argv[1]}, tensorboard="off",
        output_dir=f"{sys.argv[1]}/run",
    )  # fmt: skip
    kept, far = [], []
    for images in loader:
        dropped = model(images).detach()
        whole = eager.batch_norm(eager.left(images)).mean([2, 3]).detach()
        kept += (dropped / whole).flatten().tolist()
    model.eval()
    eager.eval()
    with torch.no_grad():
        for images in batches.split(2):
            far.append(float((model(images) - eager(images)).abs().max()))
    print(json.dumps({"kept": kept, "far": far}))


main()
