"""Loops with optimizers and loaders of other kinds: what is counted, and whether it trains right.

    python -m tests.training.own_wrapped ENGINE FOLDER [CASE ...]

Writes JSON to FOLDER.json: case -> steps and samples that the record counts, and how far the
weights are from those of the plain loop; or the error. Without a CASE it is all of them.
"""

import copy
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accbench
from accbench.errors import RequestError
from accbench.recording import records


class Sam(torch.optim.Optimizer):
    """Steps through another optimizer, never by its own `step`, as davda54/sam does."""

    def __init__(self, params: Any, base: type[torch.optim.Optimizer], **kwargs: Any) -> None:
        super().__init__(params, {"rho": 0.05, **kwargs})
        self.base_optimizer = base(self.param_groups, **kwargs)  # type: ignore[arg-type, call-arg]
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["moved"] = p.grad * 0.05
            p.add_(self.state[p]["moved"])

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(self.state[p]["moved"])
        self.base_optimizer.step()


class Lookahead:
    """Not an optimizer of torch's; has one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.num_steps = optimizer, 0
        self.slow: dict[Any, torch.Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:
        params = self.optimizer.param_groups[0]["params"]
        if not self.slow:
            self.slow = {p: p.detach().clone() for p in params}
        self.optimizer.step()
        self.num_steps += 1
        if self.num_steps % 2 == 0:
            for p in params:
                self.slow[p].lerp_(p, 0.5)
                p.copy_(self.slow[p])


def data(seed: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    samples = TensorDataset(torch.randn(12, 4, generator=generator))
    return DataLoader(samples, batch_size=2)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)


def by_sam(net: Any, optimizer: Any, loaders: Any, backward: Any) -> None:
    for (x,) in loaders[0]:
        optimizer.zero_grad()
        backward(net(x).square().mean())
        optimizer.first_step()
        optimizer.zero_grad()
        backward(net(x).square().mean())
        optimizer.second_step()


def by_lookahead(net: Any, optimizer: Any, loaders: Any, backward: Any) -> None:
    wrapped = Lookahead(optimizer)
    for (x,) in loaders[0]:
        optimizer.zero_grad()
        backward(net(x).square().mean())
        wrapped.step()


def two_optimizers(net: Any, optimizer: Any, loaders: Any, backward: Any) -> None:
    second = torch.optim.SGD(net[2].parameters(), 0.05)
    for (x,) in loaders[0]:
        net.zero_grad()
        backward(net(x).square().mean())
        optimizer.step()
        net.zero_grad()
        backward(net(x).abs().mean())
        second.step()


def of_halves(net: Any, optimizer: Any, loaders: Any, backward: Any) -> None:
    """Each has some of the parameters, and steps by the same gradients."""
    second = torch.optim.Adam(net[2].parameters(), 0.05)
    optimizer.param_groups[0]["params"][2:] = []
    for (x,) in loaders[0]:
        net.zero_grad()
        backward(net(x).square().mean())
        second.step()
        optimizer.step()


def twice_by_one(net: Any, optimizer: Any, loaders: Any, backward: Any) -> None:
    for (x,) in loaders[0]:
        backward(net(x).square().mean())
        optimizer.step()
        optimizer.step()


def zipped(net: Any, optimizer: Any, loaders: Any, backward: Any) -> None:
    for (x,), (y,) in zip(*loaders, strict=True):
        optimizer.zero_grad()
        backward((net(x) - net(y)).square().mean() + net(x).mean())
        optimizer.step()


def one_within_another(net: Any, optimizer: Any, loaders: Any, backward: Any) -> None:
    others = itertools.cycle(loaders[1])
    for index, (x,) in enumerate(loaders[0]):
        if index == 0:
            continue  # a batch that nothing is made of
        (y,) = next(others)
        optimizer.zero_grad()
        backward((net(x) - net(y)).square().mean())
        optimizer.step()


def never_stepped(net: Any, optimizer: Any, loaders: Any, backward: Any) -> None:
    for (x,) in loaders[0]:
        net.zero_grad()
        backward(net(x).square().mean())
        with torch.no_grad():
            for p in net.parameters():
                p.sub_(p.grad, alpha=0.1)


def built_before(net: Any, optimizer: Any, loaders: Any, backward: Any) -> None:
    """A second optimizer, of the parameters that the model had before accelerate."""
    for (x,) in loaders[0]:
        net.zero_grad()
        backward(net(x).square().mean())
        net.second.step()


CASES = (
    by_sam, by_lookahead, two_optimizers, of_halves, twice_by_one, zipped, one_within_another,
    never_stepped, built_before,
)  # fmt: skip


def counted(loop: Any, engine: str, folder: str) -> dict[str, Any]:
    """What the record of a loop counts, and how far its weights are from the plain loop's."""
    torch.manual_seed(0)
    own = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    plain = copy.deepcopy(own)
    for net in (own, plain):
        object.__setattr__(net, "second", sgd(net))
    make = sgd if loop is not by_sam else lambda net: Sam(net.parameters(), torch.optim.SGD, lr=0.1)
    run = accbench.accelerate(
        own, make(own), data(0), data(1), engine=engine, device="cpu", tensorboard="off",
        output_dir=folder,
    )  # fmt: skip
    try:
        loop(own, run.optimizer, run.loaders, run.backward)
        run.close()
    except RequestError as error:
        run.fail(error)
        return {"error": str(error)}
    loop(plain, make(plain), [data(0), data(1)], torch.Tensor.backward)
    pairs = zip(own.parameters(), plain.parameters(), strict=True)
    far = max(float((one.cpu() - other).norm() / other.norm()) for one, other in pairs)
    end = records.read(Path(folder) / "records.jsonl")[-1]
    assert isinstance(end, records.EndRecord)
    return {"steps": end.num_steps, "samples": end.num_samples, "far": far}


def main() -> None:
    engine, folder, *names = sys.argv[1:]
    loops = {loop.__name__: loop for loop in CASES}
    found = {name: counted(loops[name], engine, f"{folder}-{name}") for name in names or loops}
    Path(f"{folder}.json").write_text(json.dumps(found))


main()
