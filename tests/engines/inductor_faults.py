"""In a process of its own, which dies where the heap is broken: faults of torch's inductor.

    python -m tests.engines.inductor_faults CACHE_FOLDER kernels|labels

Prints JSON: how far evaluations are from eager's; of kernels also how far gradients are, and what
dropout in place made of its input.
"""

import copy
import json
import sys
from typing import Any

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


def train(run: Any, eager: Net) -> dict[str, list[float]]:
    model, optimizer, loader = run
    kept, gradients = [], []
    for images in loader:
        run.backward(model(images).square().mean())
        optimizer.step()
        eager(images).square().mean().backward()
        own, right = gradient(model), gradient(eager)
        gradients.append(float((own - right).norm() / right.norm()))
        whole = eager.batch_norm(eager.left(images)).mean([2, 3])
        kept += (model(images, drops=True) / whole).flatten().tolist()
    return {"kept": kept, "gradients": gradients}


def main() -> None:
    cache, faults = sys.argv[1:]
    torch.manual_seed(0)
    model = Net()
    batches = torch.randn(8, 3, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    eager = copy.deepcopy(model)
    run = accbench.accelerate(
        model, optimizer, DataLoader(batches, batch_size=2), engine="inductor", amp_level="O0",
        device="cpu", tensorboard="off", output_dir=f"{cache}/run-{faults}",
        inductor={"cache_dir": cache, "find_unused_parameters": True},
    )  # fmt: skip
    if faults == "kernels":
        found = train(run, eager)
        evaluated: list[Any] = [(images,) for images in batches.split(2)]
    else:
        found = {}
        evaluated = [(batches, False, torch.tensor([[3, 0, -1, 2], [1, -1, 0, 3]] * 4))]
    model.eval()
    eager.eval()
    with torch.no_grad():
        outputs = [float((model(*of) - eager(*of)).abs().max()) for of in evaluated]
    print(json.dumps({**found, "outputs": outputs}))


main()
