"""A loop of one's own over a model with norms of all kinds: plain in float64, and through an engine
in bfloat16.

    python -m tests.training.own_norms ENGINE FOLDER

Prints JSON: the losses of both.
"""

import copy
import json
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import accbench


def train(model: nn.Module, optimizer: Any, loader: Any, backward: Any) -> list[float]:
    losses = []
    for images in loader:
        optimizer.zero_grad()
        loss = (model(images) - images.mean((2, 3))).square().mean()
        backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    engine, folder = sys.argv[1:]
    torch.manual_seed(0)
    own = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 3),
    )  # fmt: skip
    plain = copy.deepcopy(own).double()
    loader = DataLoader(torch.randn(24, 3, 8, 8), batch_size=4)  # type: ignore[arg-type]
    run = accbench.accelerate(
        own, torch.optim.SGD(own.parameters(), 0.1), loader, engine=engine, amp_level="O1",
        amp_dtype="bfloat16", device="cpu", tensorboard="off", output_dir=folder,
    )  # fmt: skip
    losses = train(*run, run.backward)
    of_float64 = (images.double() for images in loader)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    expected = train(plain, optimizer, of_float64, torch.Tensor.backward)
    print(json.dumps({"plain": expected, "losses": losses}))


main()
