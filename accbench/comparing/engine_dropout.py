"""A check of the dropout masks that an engine draws itself.

It trains weights through dropout alone, so that their gradient is the mask that was drawn.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from accbench.comparing import update_rules
from accbench.config import devices_per_worker
from accbench.data import nested
from accbench.distributed.process_group import Topology, all_gather_values
from accbench.engines import Batch, Engine

# Elements of each probability's mask; enough to tell rates that differ by about a hundredth.
PROBE_SIZE = 1 << 16
PROBE_STEPS = 3
# Standard deviations from the expected value; chance alone exceeds them with probability 1e-9.
_MAX_SIGMA = 6.0


class _Probe(nn.Module):
    """A model of one weight vector and one dropout layer for each probability."""

    def __init__(self, probabilities: Sequence[float]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(PROBE_SIZE)) for _ in probabilities)
        self.dropouts = nn.ModuleList(nn.Dropout(p) for p in probabilities)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        # dynamo of torch 2.8 cannot trace zip(strict=True).
        dropped = [self.dropouts[i](self.weights[i]).sum() for i in range(len(self.dropouts))]
        # The batch is used because engines expect a model to use it.
        return torch.stack(dropped).sum() + 0 * samples.reshape(-1)[:1].float().sum()


class _ProbeSpec:
    """The probe's model spec: its loss is the model's output."""

    @staticmethod
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = model(nested.tensors_of(batch)[0])
        return loss.mean()  # over the devices of a worker


def find_problem(
    engine: Engine, topology: Topology, step: Callable[..., torch.Tensor], batch: Batch,
    probabilities: Sequence[float], seed: int,
) -> str | None:  # fmt: skip
    """Check the dropout masks that an engine draws itself.

    Checks their rate and scale, and that neither steps nor devices share a mask. All ranks call
    this.

    Returns:
        What is wrong; None if nothing is.
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
    num_masks = topology.world_size * devices_per_worker(engine.task)
    for _ in range(PROBE_STEPS):
        engine.run_step(step, model, _ProbeSpec, optimizer, batch)
        engine.wait()
        state = engine.training_state(net, optimizer)
        gradients = [
            rule.gradient(state.optimizer[name], before.state[name], before.parameters[name])
            for name in start
        ]
        # The number of masks that kept each weight, as the gradient is averaged over them.
        counts.append(
            [g * num_masks * (1 - p) for g, p in zip(gradients, probabilities, strict=True)]
        )
        before = dataclasses.replace(before, parameters=state.model, state=state.optimizer)
    problems = [
        problem
        for index, p in enumerate(probabilities)
        if (
            problem := _problem_of_counts(
                [step_counts[index] for step_counts in counts], p, num_masks
            )
        )
    ]
    # Ranks see the same averages unless the averaging is wrong; then only some may see a problem.
    any_rank = any(bad for (bad,) in all_gather_values([float(bool(problems))]))
    return problems[0] if problems else ("its ranks differ" if any_rank else None)


def _problem_of_counts(counts: Sequence[torch.Tensor], p: float, num_masks: int) -> str | None:
    """Check the masks of one dropout probability.

    Args:
        counts: of each step, the number of masks that kept each weight, (PROBE_SIZE,).
        p: the dropout probability.
        num_masks: the number of devices that draw one in a step.

    Returns:
        What is wrong; None if nothing is.
    """
    error = max(float((count - count.round()).abs().max()) for count in counts)
    if error > 1e-3 or min(float(count.min()) for count in counts) < -1e-3:
        return f"dropout of {p:g} does not scale what it keeps by 1 / (1 - p)"
    deviation = math.sqrt(p * (1 - p) / (PROBE_SIZE * num_masks))
    for count in counts:
        rate = 1 - float(count.mean()) / num_masks
        if abs(rate - p) > _MAX_SIGMA * deviation:
            return f"dropout of {p:g} drops {rate:.3g} of its input"
    variance = p * (1 - p)
    if variance == 0:
        return None
    limit = _MAX_SIGMA / math.sqrt(PROBE_SIZE)
    for first, second in ((0, 1), (1, 2), (0, 2)):
        product = (counts[first] - counts[first].mean()) * (counts[second] - counts[second].mean())
        if abs(float(product.mean())) > limit * variance * num_masks:
            return f"dropout of {p:g} repeats itself from step to step"
    # The variance of a sum of masks grows with their number if they are independent, and with its
    # square if they are equal.
    spread = float(counts[0].var()) / variance
    # The relative standard deviation of a variance is about sqrt(2 / n), and a few
    # times that for any p.
    if num_masks > 1 and abs(spread - num_masks) > num_masks * 10 * limit / min(p, 1 - p):
        return f"dropout of {p:g} is the same on several ranks"
    return None
