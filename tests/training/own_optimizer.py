"""An optimizer that goes on from a plain one's state, plain and through engine xla.

    python -m tests.training.own_optimizer NAME before|after FOLDER

Prints JSON: the losses of both, and how far weights are from each other once a plain one has gone
on from what was saved then. The state is loaded before or after `accelerate`.
"""

import copy
import json
import sys
from typing import Any

import torch
from torch import nn, optim
from torch.utils.data import DataLoader

import accbench

OPTIMIZERS = {
    "sgd": lambda model: optim.SGD(model.parameters(), 0.1, momentum=0.9, dampening=0.5),
    "rmsprop": lambda model: optim.RMSprop(model.parameters(), 1e-2, eps=1e-3),
    "nadam": lambda model: optim.NAdam(model.parameters(), 1e-2, eps=1e-3),
    "adadelta": lambda model: optim.Adadelta(model.parameters(), 1.0),
}


def train(model: nn.Module, optimizer: Any, loader: Any, backward: Any) -> list[float]:
    losses = []
    for vectors in loader:
        optimizer.zero_grad()
        loss = model(vectors).square().mean()
        backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    name, when, folder = sys.argv[1:]
    make = OPTIMIZERS[name]
    torch.manual_seed(0)
    plain, own = nn.Linear(4, 2), nn.Linear(4, 2)
    loader = DataLoader(torch.randn(16, 4), batch_size=4)
    optimizer, own_optimizer = make(plain), make(own)
    # What a checkpoint has; gradients without a backward pass, before which XLA is to be opened.
    for parameter in plain.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(2):
        optimizer.step()
    own.load_state_dict(plain.state_dict())
    checkpoint = copy.deepcopy(optimizer.state_dict())
    if when == "before":
        own_optimizer.load_state_dict(checkpoint)
    run = accbench.accelerate(
        own, own_optimizer, loader, engine="xla", amp_level="O0", device="cpu",
        tensorboard="off", output_dir=folder,
    )  # fmt: skip
    if when == "after":
        own_optimizer.load_state_dict(checkpoint)
    losses = train(*run, run.backward)
    expected = train(plain, optimizer, loader, torch.Tensor.backward)
    # And a plain one goes on from what was saved of it.
    third = nn.Linear(4, 2)
    third.load_state_dict(run.to_host(own.state_dict()))
    going_on = make(third)
    going_on.load_state_dict(run.to_host(own_optimizer.state_dict()))
    for net, its_optimizer in ((plain, optimizer), (third, going_on)):
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        its_optimizer.step()
    far = max(
        float((one - other).abs().max())
        for one, other in zip(plain.parameters(), third.parameters(), strict=True)
    )
    print(json.dumps({"plain": expected, "losses": losses, "far": far}))


main()
