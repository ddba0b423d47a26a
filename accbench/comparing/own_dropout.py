"""A look at the dropout that an engine draws by itself.

It trains weights through nothing but dropout: their gradient is the mask that was drawn.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from accbench.comparing import update_rules
from accbench.data import nested
from accbench.distributed.process_group import Topology, gather_values
from accbench.engines import Batch, Engine

# Elements a probability that own_dropout looks at; rates are told to about a hundredth.
PROBE_SIZE = 1 << 16
PROBE_STEPS = 3
# Standard deviations from what chance gives; 1e-9 by chance alone.
_MAX_SIGMA = 6.0


class _Probe(nn.Module):
    """Weights behind dropout of each probability, and nothing else."""

    def __init__(self, probabilities: Sequence[float]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(PROBE_SIZE)) for _ in probabilities)
        self.dropouts = nn.ModuleList(nn.Dropout(p) for p in probabilities)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        # zip(strict=True) is more than dynamo of torch 2.8 can trace.
        dropped = [self.dropouts[i](self.weights[i]).sum() for i in range(len(self.dropouts))]
        # The batch is only looked at because engines expect a model to.
        return torch.stack(dropped).sum() + 0 * samples.reshape(-1)[:1].float().sum()


class _ProbeSpec:
    """Its loss, as `accbench.models` has it."""

    @staticmethod
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = model(nested.tensors_of(batch)[0])
        return loss


def own_dropout(
    engine: Engine, topology: Topology, step: Callable[..., torch.Tensor], batch: Batch,
    probabilities: Sequence[float], seed: int,
) -> str | None:  # fmt: skip
    """What is wrong with the dropout that the engine draws itself; None if nothing was found.

    Rate, scale, and that neither steps nor ranks share a mask. All ranks call this.
    """
    net = _Probe(probabilities)
    model = engine.prepared(net)
    optimizer = engine.build_optimizer(model)
    engine.seed(seed + topology.rank)  # as in training
    model.train()
    counts: list[list[torch.Tensor]] = []
    rule = update_rules.of_task(engine.task)
    start = {f"weights.{i}": torch.ones(PROBE_SIZE) for i in range(len(probabilities))}
    before = update_rules.Weights.start(start, rule)
    for _ in range(PROBE_STEPS):
        engine.run_step(step, model, _ProbeSpec, optimizer, batch)
        engine.wait()
        own = engine.training_state(net, optimizer)
        gradients = [
            rule.gradient(own.optimizer[name], before.state[name], before.parameters[name])
            for name in start
        ]
        # How many ranks kept each weight, for the gradient is averaged over them.
        counts.append(
            [
                g * topology.world_size * (1 - p)
                for g, p in zip(gradients, probabilities, strict=True)
            ]
        )
        before = dataclasses.replace(before, parameters=own.model, state=own.optimizer)
    problems = [
        problem
        for index, p in enumerate(probabilities)
        if (problem := _problem([of_step[index] for of_step in counts], p, topology.world_size))
    ]
    # Ranks see the same averages, unless averaging is what is wrong; one may see more.
    found = [rank for rank, (bad,) in enumerate(gather_values([float(bool(problems))])) if bad]
    return problems[0] if problems else ("its ranks differ" if found else None)


def _problem(kept: Sequence[torch.Tensor], p: float, world_size: int) -> str | None:
    """Of the numbers of ranks that kept each weight, (PROBE_SIZE,) a step."""
    off = max(float((count - count.round()).abs().max()) for count in kept)
    if off > 1e-3 or min(float(c.min()) for c in kept) < -1e-3:
        return f"dropout of {p:g} does not scale what it keeps by 1 / (1 - p)"
    deviation = math.sqrt(p * (1 - p) / (PROBE_SIZE * world_size))
    for count in kept:
        rate = 1 - float(count.mean()) / world_size
        if abs(rate - p) > _MAX_SIGMA * deviation:
            return f"dropout of {p:g} drops {rate:.3g} of its input"
    variance = p * (1 - p)
    if variance == 0:
        return None
    limit = _MAX_SIGMA / math.sqrt(PROBE_SIZE)
    for one, other in ((0, 1), (1, 2), (0, 2)):
        both = (kept[one] - kept[one].mean()) * (kept[other] - kept[other].mean())
        if abs(float(both.mean())) > limit * variance * world_size:
            return f"dropout of {p:g} repeats itself from step to step"
    # A sum of independent masks varies by their number; of equal ones, by its square.
    spread = float(kept[0].var()) / variance
    # The standard deviation of a variance is about sqrt(2 / n) of it, for any p a few times that.
    if world_size > 1 and abs(spread - world_size) > world_size * 10 * limit / min(p, 1 - p):
        return f"dropout of {p:g} is the same on several ranks"
    return None
