"""One of two workers: a loader of a class of its own, and an evaluation of five samples.

python -m tests.training.own_loaders FOLDER
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accbench
from accbench.errors import RequestError


class Scaled(DataLoader[Any]):
    """Does something to its batches."""

    note = "lost"

    def __iter__(self) -> Iterator[Any]:
        for (x,) in super().__iter__():
            yield (x * 1000,)


class Whole(DataLoader[Any]):
    """Asks no sampler."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)


def main() -> None:
    (folder,) = sys.argv[1:]
    torch.manual_seed(0)
    samples = torch.rand(8, 3)
    net = nn.Linear(3, 1)
    loader = Scaled(TensorDataset(samples), batch_size=2)
    loader.note = "kept"
    five = DataLoader(TensorDataset(torch.arange(5.0).view(5, 1)), batch_size=2)
    run = accbench.accelerate(
        net, torch.optim.SGD(net.parameters(), 0.1), loader, five,
        Whole(TensorDataset(samples), batch_size=2), device="cpu",
        tensorboard="off", output_dir=folder,
    )  # fmt: skip
    batches = [x for (x,) in run.loaders[0]]
    found: dict[str, Any] = {"scaled": float(torch.cat(batches).mean())}
    found["plain"] = float(samples[run.rank :: 2].mean())
    found["attribute"] = run.loaders[0].note
    net.eval()
    gathered = []
    for (x,) in run.loaders[1]:
        gathered.append(run.gather({"x": x})["x"])
        found["number"] = run.gather(torch.tensor(float(run.rank))).tolist()
    found["gathered"] = torch.cat(gathered).flatten().tolist()
    # As many as the last batch has rows, but not of its samples.
    found["behind"] = run.gather(torch.tensor([float(run.rank)])).tolist()
    found["uneven"] = run.gather(torch.full((run.rank + 1,), float(run.rank))).tolist()
    number = torch.complex(torch.full((3,), float(run.rank)), torch.ones(3))
    found["complex"] = torch.view_as_real(run.gather(number)).tolist()
    try:
        next(iter(run.loaders[2]))
    except RequestError as error:
        found["past_its_sampler"] = str(error)
    Path(f"{folder}-rank{run.rank}.json").write_text(json.dumps(found))
    net.train()
    run.backward(net(batches[0]).mean())
    run.optimizer.step()


main()
