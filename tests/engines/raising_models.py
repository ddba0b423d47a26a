"""Models that are wrong by themselves, in one engine.

    python -m tests.engines.raising_models ENGINE

Prints one line of JSON: fault -> the type of what was raised, its message, and whether the
traceback has the model's line; of whole steps, and of calls as a loop of one's own makes them.
"""

import json
import sys
import traceback
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from accbench.config import plugins
from accbench.distributed.process_group import Topology
from accbench.training.train_loop import train_step
from tests.engines.beside_torch import resolved_task

FAULTS = (
    "norm", "key", "attribute", "shape", "cat", "assert", "own", "by value", "index", "loss",
)  # fmt: skip


class Failing(nn.Module):
    """Fails as it is told to."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.layer, self.norm = fault, nn.Linear(8, 4), nn.BatchNorm1d(4)
        self.table, self.num_calls = nn.Embedding(5, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.layer(x)
        faults = {
            "norm": lambda: self.norm(scores[:1]),
            "key": lambda: {"scores": scores}["logits"],
            "attribute": lambda: scores + self.missing,
            "shape": lambda: scores @ scores,
            "cat": lambda: torch.cat([scores, scores[:2]], 1),
            "index": lambda: scores[:2] + self.table(torch.full((2,), 7)),
        }
        if self.fault in faults:
            return faults[self.fault]()
        if self.fault == "assert":
            assert scores.shape[1] == 5, f"five classes, not {scores.shape[1]}"
        if self.fault == "own":
            raise ValueError("images must be square")
        if self.fault == "by value" and scores.sum() > -1e9:
            raise ValueError("too bright")
        return scores


class Spec:
    @staticmethod
    def loss(net: nn.Module, batch: Any) -> torch.Tensor:
        scores = net(batch[0])
        if getattr(net, "fault", "") == "loss":
            return functional.cross_entropy(scores, torch.zeros(2, dtype=torch.long))
        return scores.square().mean()


def of_step(fault: str, kind: Any, task: Any, name: str) -> None:
    engine = kind(task, task.options.get(name), Topology())
    net = Failing(fault)
    model = engine.prepared(net)
    optimizer = engine.build_optimizer(model)
    model.train()
    batch = engine.to_device((torch.ones(3, 8),))
    engine.run_step(train_step, model, Spec, optimizer, batch)
    engine.wait()


def of_call(fault: str, kind: Any, task: Any, name: str) -> None:
    """As in a loop of one's own, whose losses are no engine's."""
    engine = kind.for_loops()(task, task.options.get(name), Topology())
    model = engine.prepared(Failing(fault))
    with engine.calling(model):
        model(*engine.to_device((torch.ones(3, 8),)))


def main() -> None:
    name = sys.argv[1]
    task = resolved_task(name, "--batch_size=3", "--amp_level=O0")
    kind = plugins.load("engines", name)
    found: dict[str, Any] = {}
    for way in (of_step, of_call):
        for fault in FAULTS:
            try:
                way(fault, kind, task, name)
                found[f"{way.__name__} {fault}"] = None
            except Exception as error:
                frames = traceback.extract_tb(error.__traceback__)
                lines = [f.line for f in frames if f.filename == __file__ and f.name != "main"]
                found[f"{way.__name__} {fault}"] = [type(error).__name__, str(error), lines[-1]]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
