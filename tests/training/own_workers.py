"""One of several workers' loop of its own that does not only call the model and go back.

A second optimizer has some of the parameters, and the last step trains a layer that was added then.

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
        scores = model.experts[rank](model.encode(images))
        # Of which the gradient is the same on all workers, whatever its weights are.
        late = model.late(scores.detach()).mean() if step == STEPS - 1 else 0
        return [scores.square().mean() + late]
    first, second = model(images), model(images + 1)
    return [first.square().mean(), second.abs().mean()]


def optimizers(model: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(part.parameters(), 0.5) for part in (model.image, model.experts)]


def add_late(model: Any, optimizer: torch.optim.Optimizer, device: Any, weight: float) -> None:
    model.late = nn.Linear(2, 1, bias=False).to(device)
    nn.init.constant_(model.late.weight, weight)
    optimizer.add_param_group({"params": model.late.parameters()})


def main() -> None:
    engine, folder, *more = sys.argv[1:]
    world_size = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    own = Net()
    if more:
        own.unused = nn.Linear(2, 2)
    plain = copy.deepcopy(own)
    data = torch.randn(STEPS * world_size * 2, 3, 4, 4)
    run = accbench.accelerate(
        own, optimizers(own)[0], DataLoader(data, batch_size=2), engine=engine, amp_level="O0",  # type: ignore[arg-type]
        device="cpu", tensorboard="off", output_dir=folder,
    )  # fmt: skip
    _, second = optimizers(own)  # after `accelerate`, as XLA has other parameters then
    for step, images in enumerate(run.loaders[0]):
        if step == STEPS - 1:
            add_late(own, run.optimizer, run.device, 1.0 + run.rank)
        own.zero_grad()
        for loss in losses(own, images, step, run.rank):
            run.backward(loss)
        run.optimizer.step()
        second.step()
    first, second = optimizers(plain)
    for step, images in enumerate(data.split(2 * world_size)):
        if step == STEPS - 1:
            add_late(plain, first, "cpu", 1.0)
        plain.zero_grad()
        for rank in range(world_size):
            for loss in losses(plain, images[rank::world_size], step, rank):
                (loss / world_size).backward()
        first.step()
        second.step()
    pairs = zip(own.parameters(), plain.parameters(), strict=True)
    far = max(float((one.cpu() - other).norm() / other.norm()) for one, other in pairs)
    Path(f"{folder}-rank{run.rank}.txt").write_text(str(far))


main()
