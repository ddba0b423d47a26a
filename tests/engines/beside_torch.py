"""Steps of a model in one engine, beside the same steps of its copy in plain torch."""

import copy
from typing import Any

import torch
from torch import nn

from accbench import config, resolving
from accbench.config import TaskConfig, plugins
from accbench.distributed.process_group import Topology
from accbench.training import worker
from accbench.training.train_loop import train_step


def resolved_task(engine_name: str, *flags: str) -> TaskConfig:
    """A task on one CPU thread, with the environment that its engine needs set."""
    task = resolving.resolve(
        config.parse(
            [f"--engine={engine_name}", "--data=synthetic", "--device=cpu", "--threads=1",
             "--output_dir=unused", *flags]
        )
    )  # fmt: skip
    worker.apply_environment(task, Topology())
    return task


def open_engine(task: TaskConfig) -> Any:
    engine_class = plugins.load("engines", task.engine)
    return engine_class(task, task.options.get(task.engine), Topology())


class StepsBesideTorch:
    """A model in an engine, and its copy in torch, by plain SGD in float32."""

    def __init__(self, engine_name: str, net: nn.Module, lr: float) -> None:
        flags = "--optimizer=sgd", "--momentum=0", "--weight_decay=0", "--amp_level=O0"
        self.engine = open_engine(resolved_task(engine_name, *flags, f"--lr={lr}"))
        self.net, self.plain = net, copy.deepcopy(net)
        self.plain_optimizer = torch.optim.SGD(self.plain.parameters(), lr)
        self.model = self.engine.prepared(net)
        self.optimizer = self.engine.build_optimizer(self.model)
        self.model.train()

    def engine_step(self, spec: Any, batch: Any) -> torch.Tensor:
        on_device = self.engine.to_device(batch)
        return self.engine.run_step(train_step, self.model, spec, self.optimizer, on_device)

    def plain_step(self, spec: Any, batch: Any) -> torch.Tensor:
        self.plain_optimizer.zero_grad()
        loss = spec.loss(self.plain, batch)
        loss.backward()
        self.plain_optimizer.step()
        return loss.detach()
