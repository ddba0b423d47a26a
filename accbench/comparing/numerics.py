"""The numerics pass: the same training, with every step looked at. Nothing here is timed.

`python -m accbench.comparing.numerics [--float64] FLAGS` takes the flags of a run and leaves a
run's folder whose records hold `numerics` lines in place of windows. With
`--float64` the model is trained in double precision.
"""

import math
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from accbench import config, models, plugins
from accbench.config import TaskConfig
from accbench.engines import Engine
from accbench.errors import ERROR_FILE_VARIABLE, NonFiniteLossError
from accbench.launchers.run import run
from accbench.logger import RunLogger
from accbench.recording import records
from accbench.training import process_group, worker
from accbench.training.process_group import Topology
from accbench.training.train_loop import train_step

SKETCH_SIZE = 16
_FLOAT64 = "--float64"


class Sketcher:
    """Tensors to `SKETCH_SIZE` numbers that keep distances.

    Elements get random signs and are summed in `SKETCH_SIZE` buckets (Charikar, Chen
    and Farach-Colton, Finding frequent items in data streams, 2002). The expected
    square of the distance of two sketches is that of the tensors; its standard
    deviation is sqrt(2 / SKETCH_SIZE) of it, 35 %.
    """

    def __init__(self) -> None:
        self._signs = torch.empty(0)

    def sketch(self, tensor: torch.Tensor) -> list[float]:
        """Of a tensor on the host, of any shape and type."""
        size = tensor.numel()
        if size > self._signs.numel():  # the same signs whatever the sizes asked for
            generator = torch.Generator().manual_seed(1)
            bits = torch.randint(0, 2, (size,), generator=generator, dtype=torch.int8)
            self._signs = (2 * bits - 1).double()
        signed = tensor.detach().reshape(-1).double() * self._signs[:size]
        padded = nn.functional.pad(signed, (0, -size % SKETCH_SIZE))
        return padded.view(-1, SKETCH_SIZE).sum(0).tolist()


def watch(task: TaskConfig, topology: Topology, double: bool) -> None:
    """Train `--max_steps` steps and record a `NumericsRecord` for each.

    Raises:
        NonFiniteLossError: on all ranks, if the loss of any is not finite.
    """
    logger = RunLogger(task.run_dir, topology.rank)
    engine: Engine = plugins.load("engines", task.engine)(
        task, task.options.get(task.engine), topology
    )
    source_name, location = config.data_name(task.data)
    source = plugins.load("data", source_name)(
        location, task, task.options.get(source_name), topology
    )
    logger.write(worker.run_record(task, engine, topology, source.num_classes))
    engine.prove_reduction()
    spec = models.resolve(task.model)
    torch.manual_seed(task.seed)
    net = spec.build(source.num_classes)
    if double:
        net = net.double()
    process_group.broadcast_module(net)
    model = engine.prepare(net)
    optimizer = engine.build_optimizer(model)
    look = Look(task, net, optimizer)
    logger.write(look.record(0, None))
    model.train()
    steps = 0
    for batch in _batches(engine, source.train_loader()):
        loss = engine.run_step(train_step, model, spec, optimizer, batch)
        engine.wait()
        steps += 1
        record = look.record(steps, loss.double().cpu().item())
        logger.write(record)
        if record.loss is None:
            raise NonFiniteLossError(f"the loss is not finite at step {steps - 1}")
        if steps == task.max_steps:
            break
    logger.write(records.EndRecord("ok", num_steps=steps))
    engine.close()


def _batches(engine: Engine, loader: Any) -> Any:
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        yield from engine.device_batches(loader)
        epoch += 1


class Look:
    """Reads what training changed: parameters, buffers, and the gradients that were used."""

    def __init__(self, task: TaskConfig, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.net, self.optimizer = net, optimizer
        self._sketcher = Sketcher()
        self._moments: dict[str, torch.Tensor] = {}
        # AdamW again, on the host in float64, from the engine's own gradients: whether
        # the engine's optimizer computes what it should, whatever its gradients are.
        self._shadow = {n: p.to(torch.float64, copy=True) for n, p in self._parameters().items()}
        self._shadow_optimizer = torch.optim.AdamW(
            self._shadow.values(), lr=task.lr, weight_decay=task.weight_decay
        )
        self._applied_steps = 0

    def record(self, step: int, own_loss: float | None) -> records.NumericsRecord:
        """The state after `step` steps; all ranks call this."""
        parameters = self._parameters()
        saved = self.net.state_dict()  # an engine may keep buffers in another form
        buffers = {
            n: saved.get(n, b).detach().cpu()
            for n, b in self.net.named_buffers()
            if b.is_floating_point()
        }
        sketches = {n: self._sketcher.sketch(t) for n, t in {**parameters, **buffers}.items()}
        gradients = self._gradients() if step else {}
        squares = sum(float(gradient.square().sum()) for gradient in gradients.values())
        norm = math.sqrt(squares) if math.isfinite(squares) else None
        return records.NumericsRecord(
            step=step,
            loss=None if own_loss is None else _mean_over_ranks(own_loss),
            grad_norm=norm if step else None,
            rank_difference=_rank_difference([sketches[name] for name in parameters]),
            sketches=sketches,
            gradients={n: self._sketcher.sketch(g) for n, g in gradients.items()},
            update_errors=self._update_errors(parameters, gradients) if norm is not None else {},
        )

    def _parameters(self) -> dict[str, torch.Tensor]:
        return {n: p.detach().cpu() for n, p in self.net.named_parameters()}

    def _gradients(self) -> dict[str, torch.Tensor]:
        # From AdamW's first moment, m_t = b1 m_(t-1) + (1 - b1) g: what the optimizer
        # used, averaged and unscaled, wherever an engine does those.
        gradients = {}
        beta1 = self.optimizer.param_groups[0]["betas"][0]
        for name, parameter in self.net.named_parameters():
            moment = self.optimizer.state[parameter]["exp_avg"].detach().cpu()
            moment = moment.to(torch.float64, copy=True)
            before = self._moments.get(name, torch.zeros(()))
            gradients[name] = (moment - beta1 * before) / (1 - beta1)
            self._moments[name] = moment
        return gradients

    def _update_errors(
        self, parameters: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]
    ) -> dict[str, float]:
        """Tensor -> how far it is from where AdamW should have put it, as a part of the way."""
        applied_steps = Engine.applied_steps(self.optimizer) if gradients else 0
        skipped = applied_steps == self._applied_steps
        self._applied_steps = applied_steps
        if skipped:  # before the first step, or a float16 gradient overflowed
            return {}
        before = {n: p.clone() for n, p in self._shadow.items()}
        for name, parameter in self._shadow.items():
            parameter.grad = gradients[name]
        self._shadow_optimizer.step()
        errors = {}
        for name, parameter in self._shadow.items():
            moved = float((parameter - before[name]).norm())
            away = float((parameters[name].double() - parameter).norm())
            errors[name] = away / moved if moved else away
            parameter.copy_(parameters[name])  # the next step starts where the engine is
        return errors


def _mean_over_ranks(value: float) -> float | None:
    of_ranks = [value for (value,) in process_group.gather_values([value])]
    return records.finite_or_none(sum(of_ranks) / len(of_ranks))


def _rank_difference(sketches: list[list[float]]) -> float:
    own = [value for sketch in sketches for value in sketch]
    of_ranks = process_group.gather_values(own)
    return max(
        abs(a - b) for other in of_ranks for a, b in zip(other, of_ranks[0], strict=True)
    )  # fmt: skip


def main(argv: Sequence[str], started: float) -> int:
    """The launcher, and behind it each worker."""
    double = _FLOAT64 in argv
    flags = [flag for flag in argv if flag != _FLOAT64]
    if ERROR_FILE_VARIABLE in os.environ:

        def job(task: TaskConfig, topology: Topology, _started: float, _console: Any) -> None:
            watch(task, topology, double)

        return worker.main(flags, started, job)
    command = ["-m", "accbench.comparing.numerics", *([_FLOAT64] if double else [])]
    return run(flags, prog="accbench.comparing.numerics", worker=command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], time.perf_counter()))
