"""Gradients of a model with norms of all kinds, through an engine in bfloat16, beside float64's.

    python -m tests.training.own_norms ENGINE FOLDER

Prints JSON: parameter -> relative distance, the mean over batches.
"""

import copy
import json
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import accbench


def loss_of(model: Any, images: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(images) - images.mean((2, 3))).square().mean()
    return loss


def main() -> None:
    engine, folder = sys.argv[1:]
    torch.manual_seed(0)
    own = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, bias=False),
        nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(8),
        nn.Linear(8, 3),
    )  # fmt: skip
    plain = copy.deepcopy(own).double()
    loader = DataLoader(torch.randn(80, 3, 8, 8), batch_size=4)  # type: ignore[arg-type]
    run = accbench.accelerate(
        own, torch.optim.SGD(own.parameters(), 0.0), loader, engine=engine, amp_level="O1",
        amp_dtype="bfloat16", device="cpu", tensorboard="off", output_dir=folder,
    )  # fmt: skip
    far = {name: 0.0 for name, _ in own.named_parameters()}
    for images in run.loaders[0]:
        run.optimizer.zero_grad()
        run.backward(loss_of(own, images))
        plain.zero_grad()
        loss_of(plain, images.cpu().double()).backward()
        for (name, one), other in zip(own.named_parameters(), plain.parameters(), strict=True):
            gradient: Any = other.grad
            distance = (one.grad.cpu() - gradient).norm() / gradient.norm()  # type: ignore[union-attr]
            far[name] += float(distance) / len(loader)
        run.optimizer.step()
    print(json.dumps(far))


main()
