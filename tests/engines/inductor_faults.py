"""In a process of its own, which dies where the heap is broken: faults of torch's inductor.

    python -m tests.engines.inductor_faults CACHE_FOLDER

Prints JSON: how far evaluations and gradients are from eager's, and what dropout in place made of
its input.
"""

import copy
import json
import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import accbench


class Net(nn.Module):
    """The end of a ConvNeXt, and BatchNorm, mean and dropout in place."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 320, 4, 4), nn.Conv2d(3, 320, 4, 4)
        self.scale = nn.Parameter(torch.randn(320, 1, 1))
        self.batch_norm, self.layer_norm = nn.BatchNorm2d(320), nn.LayerNorm(320)
        self.dropout = nn.Dropout(0.25, inplace=True)
        self.classes = nn.Linear(320, 10)

    def forward(
        self, images: torch.Tensor, drops: bool = False, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(N, 3, 8, 8) to logits (N, 10), to what dropout leaves (N, 320) or to losses (N,)."""
        if labels is not None:
            scores = images.flatten(1)[:, : labels.shape[1]]
            return functional.multilabel_margin_loss(scores, labels, reduction="none")
        if drops:
            return self.dropout(self.batch_norm(self.left(images)).mean([2, 3]))
        pixels = self.right(images)
        if not self.training:
            pixels = pixels + self.left(images) * self.scale
        mean = self.layer_norm(pixels.mean([2, 3], keepdim=True).permute(0, 2, 3, 1))
        return self.classes(mean.permute(0, 3, 1, 2).flatten(1))


def gradient(model: Net) -> torch.Tensor:
    """Of the convolution before the mean, which is then as new."""
    found = model.right.weight.grad.clone()
    model.zero_grad()
    return found


def main() -> None:
    torch.manual_seed(0)
    plain = Net()
    batches = torch.randn(8, 3, 8, 8)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.0)
    eager = copy.deepcopy(plain)
    run = accbench.accelerate(
        plain, optimizer, DataLoader(batches, batch_size=2), engine="inductor", amp_level="O0",
        device="cpu", tensorboard="off", output_dir=f"{sys.argv[1]}/run",
        inductor={"cache_dir": sys.argv[1], "find_unused_parameters": True},
    )  # fmt: skip
    model, optimizer, loader = run
    kept, gradients, outputs = [], [], []
    for images in loader:
        run.backward(model(images).square().mean())
        optimizer.step()
        eager(images).square().mean().backward()
        own, right = gradient(plain), gradient(eager)
        gradients.append(float((own - right).norm() / right.norm()))
        whole = eager.batch_norm(eager.left(images)).mean([2, 3])
        kept += (model(images, drops=True) / whole).flatten().tolist()
    model.eval()
    eager.eval()
    with torch.no_grad():
        for images in batches.split(2):
            outputs.append(float((model(images) - eager(images)).abs().max()))
        given = (batches, False, torch.tensor([[3, 0, -1, 2], [1, -1, 0, 3]] * 4))
        outputs.append(float((model(*given) - eager(*given)).abs().max()))
    print(json.dumps({"kept": kept, "gradients": gradients, "outputs": outputs}))


main()
