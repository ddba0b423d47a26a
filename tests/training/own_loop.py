"""A loop of one's own, plain and through an engine; parameters have hooks and attributes, layers
are unfrozen in the second half, and evaluation is under inference mode.

    python -m tests.training.own_loop ENGINE FOLDER

Writes JSON to FOLDER-rank0.json: losses, and how far the weights end from those of the plain loop.
One of several workers writes its own losses, and has no hooks, which DistributedDataParallel passes
by.
"""

import copy
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader

import accbench

STEPS = 8


class Net(nn.Module):
    """A convolution over time and space, ELU, constants made as it runs, a resizing by what is no
    quotient of sizes, a pooling with gaps, channels and pixels in one view, sequences of several
    lengths, a log-sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Conv3d(1, 4, 2)
        self.image = nn.Conv2d(4, 4, 2, padding=1)
        self.words = nn.GRU(3, 2)
        self.head = nn.Linear(66, 3)

    def forward(self, clips: torch.Tensor, words: PackedSequence) -> torch.Tensor:
        """(N, 1, 3, 4, 4) and N sequences to (N, 3)."""
        found = functional.elu(self.backbone(clips)).mean(2)[:, [0, 2, 1, 3]]
        found = functional.interpolate(self.image(found), scale_factor=1.7, mode="bilinear")
        found = functional.max_pool2d(found, 2, 1, dilation=2)
        found = found * torch.tensor([1.0, 0.5, 2.0, 1.5], device=found.device).view(1, 4, 1, 1)
        _, (last,) = self.words(words)
        found = torch.cat([found.view(len(found), -1), last], 1)
        return functional.logsigmoid(self.head(found))


def collated(samples: list[Any]) -> tuple[torch.Tensor, PackedSequence, torch.Tensor]:
    clips, words, classes = zip(*samples, strict=True)
    return torch.stack(clips), pack_sequence(words, enforce_sorted=False), torch.stack(classes)


def halve(parameter: nn.Parameter) -> None:
    parameter.grad = parameter.grad * parameter.rate


def train(
    model: nn.Module, optimizer: Any, loader: Any, backward: Callable[[torch.Tensor], None]
) -> list[float]:
    """Losses of the steps, and of an evaluation after half of them and one at the end."""
    losses, num_steps = [], len(loader)
    for step, (clips, words, classes) in enumerate(loader, 1):
        optimizer.zero_grad()
        loss = functional.nll_loss(model(clips, words), classes)
        backward(loss)
        optimizer.step()
        losses.append(loss.item())
        if step % (num_steps // 2) == 0:
            model.backbone.requires_grad_(True)
            losses.append(evaluated(model.eval(), loader))
            model.train()
    return losses


@torch.inference_mode()
def evaluated(model: nn.Module, loader: Any) -> float:
    total = 0.0
    for clips, words, classes in loader:
        # Of batches and of results there are views.
        scores = model(clips.view(-1, 1, 3, 4, 4), words).view(-1, 3)
        total += functional.nll_loss(scores, classes.view(-1)).item()
    return total


def main() -> None:
    engine, folder = sys.argv[1:]
    torch.manual_seed(0)
    plain = Net()
    plain.backbone.requires_grad_(False)
    own = copy.deepcopy(plain)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    for net in (plain, own) if world_size == 1 else ():  # before `accelerate`
        net.head.bias.register_hook(lambda gradient: gradient / 2)
        net.head.weight.register_post_accumulate_grad_hook(halve)
        net.head.weight.rate = 0.5
    data = [
        (torch.randn(1, 3, 4, 4), torch.randn(1 + index % 4, 3), torch.randint(3, ()))
        for index in range(STEPS * 4)
    ]
    loader = DataLoader(data, batch_size=4, collate_fn=collated)  # type: ignore[arg-type]
    run = accbench.accelerate(
        own, torch.optim.SGD(own.parameters(), 0.5), loader, engine=engine, amp_level="O0",
        device="cpu", tensorboard="off", output_dir=folder,
    )  # fmt: skip
    # After `accelerate`, for XLA wants to be opened before anything is differentiated.
    of_all = DataLoader(data, batch_size=4 * world_size, collate_fn=collated)  # type: ignore[arg-type]
    expected = train(plain, torch.optim.SGD(plain.parameters(), 0.5), of_all, torch.Tensor.backward)
    losses = train(*run, run.backward)
    weights = dict(plain.state_dict())
    far = max(
        float((tensor.cpu() - weights[name]).norm() / weights[name].norm())
        for name, tensor in own.state_dict().items()
    )
    found = {"plain": expected, "losses": losses, "far": far}
    Path(f"{folder}-rank{run.rank}.json").write_text(json.dumps(found))


main()
