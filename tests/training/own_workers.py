"""One of several workers' loop of its own that does not only call the model and go back.

    python -m tests.training.own_workers ENGINE FOLDER [unused]

Writes to FOLDER-rankN.txt how far the weights end from those of one plain loop over all samples.
With `unused` the model has a layer that nothing uses.
"""

import copy
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import accbench

STEPS = 4


class Net(nn.Module):
    """Has experts, of which its own `forward` takes both."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(3, 4, 2)
        self.experts = nn.ModuleList([nn.Linear(36, 2), nn.Linear(36, 2)])

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.image(images)).flatten(1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = self.encode(images)
        scores: torch.Tensor = self.experts[0](found) + self.experts[1](found)
        return scores


def losses(model: Any, images: torch.Tensor, step: int, rank: int) -> list[torch.Tensor]:
    """What a step goes back from, one after the other."""
    if step % 2:  # methods and submodules alone; workers don't take the same ones
        return [model.experts[rank](model.encode(images)).square().mean()]
    first, second = model(images), model(images + 1)
    return [first.square().mean(), second.abs().mean()]


def main() -> None:
    engine, folder, *more = sys.argv[1:]
    world_size = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    own = Net()
    if more:
        own.unused = nn.Linear(2, 2)
    plain = copy.deepcopy(own)
    data = torch.randn(STEPS * world_size * 2, 3, 4, 4)
    optimizer = torch.optim.SGD(own.parameters(), 0.5)
    run = accbench.accelerate(
        own, optimizer, DataLoader(data, batch_size=2), engine=engine, amp_level="O0",  # type: ignore[arg-type]
        device="cpu", tensorboard="off", output_dir=folder,
    )  # fmt: skip
    for step, images in enumerate(run.loaders[0]):
        optimizer.zero_grad()
        for loss in losses(own, images, step, run.rank):
            run.backward(loss)
        optimizer.step()
    optimizer = torch.optim.SGD(plain.parameters(), 0.5)
    for step, images in enumerate(data.split(2 * world_size)):
        optimizer.zero_grad()
        for rank in range(world_size):
            for loss in losses(plain, images[rank::world_size], step, rank):
                (loss / world_size).backward()
        optimizer.step()
    pairs = zip(own.parameters(), plain.parameters(), strict=True)
    far = max(float((one.cpu() - other).norm() / other.norm()) for one, other in pairs)
    Path(f"{folder}-rank{run.rank}.txt").write_text(str(far))


main()
