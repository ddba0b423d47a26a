"""Programs that train through the xla engine on the CPU, a process of their own each.

    python -m tests.engines.xla_steps PROGRAM ARGUMENT

    long O0 | odd fallback | odd outside | python 4 | batchnorm 0 | graph O0 | norms off

The last line they print is JSON; all but `graph` and `norms` train twice, traced and replayed.
"""

import copy
import dataclasses
import itertools
import json
import os
import sys
from typing import Any

os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch  # noqa: E402
from torch import nn  # noqa: E402

from accbench.config import TaskConfig  # noqa: E402
from accbench.distributed.process_group import Topology  # noqa: E402
from accbench.engines.xla import Engine  # noqa: E402
from accbench.training.train_loop import train_step  # noqa: E402

NUM_STEPS = 50


@dataclasses.dataclass
class Spec:
    """Cross-entropy of a net on float images."""

    mean: torch.Tensor | None = None
    """Where given, a running mean of the loss that the step writes, outside of the model."""

    def loss(self, model, batch):
        loss = nn.functional.cross_entropy(model(batch[0]).float(), batch[1])
        if self.mean is not None:
            self.mean.lerp_(loss.detach(), 0.5)
        return loss


def make_engine(replay: str, amp: str = "O0", world_size: int = 1, lean: str = "auto") -> Engine:
    task = TaskConfig(
        engine="xla", device="cpu", threads=1, batch_size=8, lr=1e-3,
        amp_level="O0" if amp == "O0" else "O1", amp_dtype=None if amp == "O0" else amp,
    )  # fmt: skip
    topology = Topology(0, 0, world_size, world_size)
    engine = Engine(task, Engine.Options(replay=replay, lean=lean), topology)
    if engine.precision.scaler is not None:
        engine.precision.scaler._init_scale = 2.0**24  # overflows, and is halved, for some steps
    return engine


def make_net(leaves: bool = False) -> nn.Module:
    torch.manual_seed(0)
    pool: Any = nn.AdaptiveMaxPool2d(5) if leaves else nn.AdaptiveAvgPool2d(7)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2),
        pool, nn.Flatten(), nn.Linear(8 * pool.output_size**2, 10),
    )  # fmt: skip


def make_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Eights, and a short one at the end of every ten."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for step in range(NUM_STEPS):
        size = 3 if step % 10 == 9 else 8
        images = torch.randn(size, 3, 16, 16, generator=generator)
        batches.append((images, torch.randint(0, 10, (size,), generator=generator)))
    return batches


def start(engine: Engine, leaves: bool = False):
    engine.xm.set_rng_state(7)
    model = engine.prepare(make_net(leaves))
    return model, engine.build_optimizer(model)


def evaluate(engine: Engine, model: nn.Module) -> float:
    model.eval()
    with torch.no_grad(), engine.autocast():
        total = model(engine.to_device(make_batches()[0])[0]).float().sum()
    engine.end_step()
    model.train()
    return total.cpu().item()


def long_run(mode: str, amp: str) -> dict:
    """Fifty steps with all that may happen between steps, from replay's point of view."""
    engine = make_engine(mode, amp)
    model, optimizer = start(engine)
    numbers, saved = [], None
    for step, batch in enumerate(make_batches()):
        group = optimizer.param_groups[0]
        group["lr"] = 0.0 if step == 15 else 1e-3 * (1 + step % 7)
        group["weight_decay"] = 0.01 if step < 36 else 0.02
        if step == 20:
            saved = {name: value.cpu().clone() for name, value in model.state_dict().items()}
            saved_optimizer = optimizer.state_dict()
            saved_optimizer["state"] = {
                index: {name: value.cpu().clone() for name, value in state.items()}
                for index, state in saved_optimizer["state"].items()
            }
        if step == 30:
            model.load_state_dict(saved)
        if step == 40:
            optimizer.load_state_dict(saved_optimizer)
        if step == 25:  # frozen for five steps
            model[0].weight.requires_grad_(False)
        if step == 30:
            model[0].weight.requires_grad_(True)
        loss = engine.run_step(train_step, model, Spec(), optimizer, engine.to_device(batch))
        numbers.append(loss.cpu().item())
        if step % 10 == 5:
            numbers.append(evaluate(engine, model))
    numbers += [value.cpu().double().sum().item() for value in model.state_dict().values()]
    return {
        "numbers": [float(number).hex() for number in numbers],
        "replayed": engine.num_replayed,
        "applied": engine.applied_steps(optimizer),
    }


def odd_run(mode: str, why: str) -> dict:
    """Steps that must not be replayed: a pooling leaves the compiler; an outside tensor."""
    engine = make_engine(mode)
    model, optimizer = start(engine, leaves=why == "fallback")
    spec = Spec(torch.zeros(()).to(engine.device) if why == "outside" else None)
    losses = [
        engine.run_step(train_step, model, spec, optimizer, engine.to_device(batch)).cpu().item()
        for batch in make_batches()[:6]
    ]
    if spec.mean is not None:
        losses.append(spec.mean.cpu().item())
    given_up = engine._replay.given_up if engine._replay else None
    return {"numbers": [loss.hex() for loss in losses], "given_up": given_up,
            "replayed": engine.num_replayed}  # fmt: skip


def python_run(mode: str, num_calls: str) -> dict:
    """120 steps of a net that Python code changes in every other pair of its calls, but not in
    the first `num_calls`. Recording a step calls it twice."""
    engine = make_engine(mode)
    model, optimizer = start(engine)
    calls = itertools.count(1)

    def doubled_at_times(module, inputs, output):
        call = next(calls)
        return output * 2.0 if call > int(num_calls) and call // 2 % 2 else output

    model.register_forward_hook(doubled_at_times)
    batches = [batch for batch in make_batches() if len(batch[0]) == 8]
    for step in range(120):
        batch = engine.to_device(batches[step % len(batches)])
        engine.run_step(train_step, model, Spec(), optimizer, batch)
    given_up = engine._replay.given_up if engine._replay else None
    return {"given_up": given_up, "replayed": engine.num_replayed}


def batchnorm_run(mode: str, _argument: str) -> dict:
    """BatchNorm's statistics beside torch's own, of the same images, with a frozen net.

    Batches of two sizes, evaluations, a state saved and loaded into a net that goes on,
    and a part of a state, without statistics.
    """
    engine = make_engine(mode)
    engine.task = dataclasses.replace(engine.task, lr=1e-20, weight_decay=0.0)
    model, optimizer = start(engine)
    plain = make_net()
    differences, evaluations, compiles = {}, [], []
    saved = None
    for step, (images, labels) in enumerate(make_batches()[:30]):
        batch = engine.to_device((images, labels))
        engine.run_step(train_step, model, Spec(), optimizer, batch)
        plain.train()(images)
        if step % 7 == 6:
            with torch.no_grad():
                expected = plain.eval()(make_batches()[0][0]).sum().item()
            evaluations.append((evaluate(engine, model), expected))
        if step == 7:
            model.load_state_dict({"0.weight": plain[0].weight}, strict=False)
            engine.xla.sync()
        if step == 15:
            saved = {name: value.cpu().clone() for name, value in model.state_dict().items()}
        if step == 22:
            model.load_state_dict(saved)
            plain.load_state_dict(saved)
            engine.xla.sync()
        compiles.append(engine.compile_stats().num_compiles)
        state = model.state_dict()
        for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
            difference = (state[name].cpu() - plain.state_dict()[name]).abs().max().item()
            differences[name] = max(differences.get(name, 0.0), difference)
    return {
        "differences": differences,
        "evaluations": evaluations,
        "compiles": compiles,
        "replayed": engine.num_replayed,
    }


def graph(amp: str) -> dict:
    """The real step's graph as eight workers with collectives in the graph would have it."""
    engine = make_engine("off", amp, world_size=8)
    engine.strategy.collectives = "in_graph"
    engine.xm.set_replication(engine.device, engine.xm.get_xla_supported_devices())
    model, optimizer = start(engine)
    batch = engine.to_device(make_batches()[0])
    engine.xla.sync()
    engine.end_step = lambda: None
    loss = train_step(engine, model, Spec(), optimizer, batch)
    roots = [*model.parameters(), *model.buffers(), loss]
    for state in optimizer.state.values():
        roots += [state["step"], state["exp_avg"], state["exp_avg_sq"]]
    if engine.precision.scaler is not None:
        roots += [engine.precision.scaler._scale, engine.precision.scaler._growth_tracker]
    hlo = engine.xla._XLAC._get_xla_tensors_hlo(roots)
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"hlo": hlo, "parameters": len(list(model.parameters())), "bytes": num_bytes}


def norms(lean: str) -> dict:
    """How far norms of values whose mean is 100 deviations are from float64's: the largest
    difference of what is computed, of its gradients and of statistics, beside the largest value.
    """
    mean = 100
    engine = make_engine("off", lean=lean)
    images, vectors = (4, 6, 5, 5), (8, 6)
    cases = {
        "BatchNorm2d": (nn.BatchNorm2d(6), images),
        "BatchNorm1d of vectors": (nn.BatchNorm1d(6), vectors),
        "BatchNorm2d, cumulative": (nn.BatchNorm2d(6, momentum=None), images),
        "BatchNorm2d, no statistics": (nn.BatchNorm2d(6, track_running_stats=False), images),
        "BatchNorm2d, not affine": (nn.BatchNorm2d(6, affine=False), images),
        "InstanceNorm2d": (nn.InstanceNorm2d(6, affine=True, track_running_stats=True), images),
        "LayerNorm": (nn.LayerNorm(6), vectors),
        "LayerNorm of two dims": (nn.LayerNorm((5, 5), bias=False), images),
        "GroupNorm": (nn.GroupNorm(3, 6), images),
        "GroupNorm of vectors": (nn.GroupNorm(2, 12, affine=False), (8, 12)),
    }
    generator = torch.Generator().manual_seed(5)

    def outcome(net: nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor]:
        found = []
        for batch in batches:
            given = batch.detach().requires_grad_()
            out = net(given)
            loss = (out * (given.detach() - mean) ** 2).sum()
            (slope,) = torch.autograd.grad((out**2).sum() + loss, given, create_graph=True)
            (loss + (slope**2).sum()).backward()  # which differentiates twice
            found += [out, slope, given.grad]
        found += [parameter.grad for parameter in net.parameters()]
        found += list(net.state_dict().values())
        with torch.no_grad():
            found.append(net.eval()(batches[0]))
        return [tensor.detach().cpu().double() for tensor in found]

    worst = {}
    for name, (net, shape) in cases.items():
        batches = [torch.randn(shape, generator=generator) + mean for _ in range(2)]
        exact = outcome(copy.deepcopy(net).double(), [batch.double() for batch in batches])
        on_device = [engine.to_device((batch,))[0] for batch in batches]
        found = outcome(engine.prepare(net), on_device)
        differences = [
            (a - b).abs().max() / b.abs().max() for a, b in zip(found, exact, strict=True)
        ]
        worst[name] = max(map(float, differences))
    return worst


if __name__ == "__main__":
    program, argument = sys.argv[1:]
    if program in ("graph", "norms"):
        answer = {"graph": graph, "norms": norms}[program](argument)
    else:
        runs = {"long": long_run, "odd": odd_run, "python": python_run}
        run = {**runs, "batchnorm": batchnorm_run}[program]
        answer = {mode: run(mode, argument) for mode in ("off", "on")}
    print(json.dumps(answer))
