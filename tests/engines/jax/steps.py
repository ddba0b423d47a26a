"""Steps of engine jax compared with eager's, in one process: python -m tests.engines.jax.steps

Prints one line of JSON for the tests: name of a case -> its results.
"""

import copy
import json
import logging
import sys
from typing import Any

import torch
from torch import nn

from accbench import models
from accbench.engines import optimizers
from accbench.recording.terminal import log
from accbench.training.train_loop import evaluate, train_step
from tests.engines.beside_torch import open_engine, resolved_task

NUM_STEPS = 6
COMMON = (
    "--synthetic.num_classes=10", "--batch_size=4", "--image_size=16", "--lr=1e-2", "--seed=3",
)  # fmt: skip


class Training:
    """One engine with a model, on batches that are the same for all engines."""

    def __init__(self, engine: str, model: str, *flags: str) -> None:
        self.task = resolved_task(engine, f"--model={model}", *COMMON, *flags)
        self.spec = models.of_task(self.task)
        generator = torch.Generator().manual_seed(1)
        self.batches = [self.spec.synthetic_batch(4, 10, generator) for _ in range(NUM_STEPS)]
        torch.manual_seed(0)
        self.net = self.spec.build(10)
        self.engine = open_engine(self.task)
        self.model = self.engine.prepared(self.net)
        self.optimizer = self.engine.build_optimizer(self.model)
        self.engine.seed(self.task.seed)
        self.model.train()
        self.start = self.state()
        self.losses: list[float] = []

    def state(self) -> Any:
        return self.engine.training_state(self.net, self.optimizer)

    def steps(self, first: int = 0, last: int = NUM_STEPS) -> "Training":
        for number in range(first, last):
            # Another rate in each step, as schedules have it.
            for group in self.optimizer.param_groups:
                group["lr"] = self.task.lr / (1 + number)
            batch = self.engine.to_device(self.batches[number])
            arguments = train_step, self.model, self.spec, self.optimizer, batch
            self.losses.append(self.engine.run_step(*arguments).item())
        self.engine.wait()
        return self


def distance(ours: dict, expected: dict, start: dict) -> float:
    """Return the largest distance of a tensor from its expected value, relative to its update."""
    return max(
        float((ours[n].double() - t.double()).norm())
        / (float((t.double() - start[n].double()).norm()) or 1.0)
        for n, t in expected.items()
    )


def compare_with_eager(model: str, *flags: str) -> dict:
    """Compare engine jax with engine ddp after the steps."""
    ours, eager = (Training(engine, model, *flags).steps() for engine in ("jax", "ddp"))
    states, starts = (ours.state(), eager.state()), (ours.start, eager.start)

    def flat(state: Any) -> dict:
        return {f"{n} {key}": t for n, kept in state.optimizer.items() for key, t in kept.items()}

    return {
        "weights": distance(states[0].model, states[1].model, starts[1].model),
        "optimizer": distance(flat(states[0]), flat(states[1]), flat(starts[1])),
        "losses": [ours.losses, eager.losses],
        "scaler": [state.scaler for state in states],
        "applied": [t.engine.applied_steps(t.optimizer) for t in (ours, eager)],
        "compiles": ours.engine.compile_stats().num_compiles,
        "moved": distance(states[0].model, starts[0].model, starts[0].model),
        "buffers moved": sum(
            float((states[0].model[n] - b).abs().sum())
            for n, b in starts[0].model.items() if n in dict(ours.net.named_buffers())
        ),
    }  # fmt: skip


def compare_with_float64(model: str, *flags: str) -> dict:
    """Compare both engines with the same training in float64, by plain SGD."""
    distances = {}
    for engine in ("jax", "ddp"):
        training = Training(engine, model, "--amp_level=O0", "--optimizer=sgd", *flags)
        torch.manual_seed(0)
        net = training.spec.build(10).double()
        plain = torch.optim.SGD(net.parameters(), lr=training.task.lr, momentum=0.9)
        for batch in training.batches[:2]:
            arguments = train_step, training.model, training.spec, training.optimizer, batch
            training.engine.run_step(*arguments)
            plain.zero_grad()
            training.spec.loss(net, batch).backward()
            plain.step()
        expected = dict([*net.named_parameters(), *net.named_buffers()])
        distances[engine] = distance(training.state().model, expected, training.start.model)
    return distances


def resumed() -> dict:
    """Compare an unbroken training with one that another engine object resumes; with dropout."""
    flags = ("tests.nets:dropping", "--amp_level=O0", "--ema_decay=0.9")
    unbroken = Training("jax", *flags).steps()
    before = Training("jax", *flags).steps(0, 3)
    state, random = before.state(), before.engine.rng_state()
    after = Training("jax", *flags)
    after.engine.seed(77)
    after.engine.load_training_state(after.net, after.optimizer, state)
    after.engine.load_rng_state(random)
    after.steps(3)
    before.steps(3)
    ends = [t.state() for t in (unbroken, before, after)]
    return {
        "losses": [unbroken.losses, before.losses, before.losses[:3] + after.losses],
        "same": [all(torch.equal(t, ends[0].model[n]) for n, t in end.model.items())
                 for end in ends[1:]],
        "same optimizer": all(
            torch.equal(t, ends[0].optimizer[n][key])
            for n, kept in ends[2].optimizer.items() for key, t in kept.items()
        ),
    }  # fmt: skip


def written_from_outside() -> dict:
    """Read and write torch's tensors between steps, which JAX's arrays must follow."""
    ours, eager = (
        Training(engine, "tests.nets:tiny", "--amp_level=O0") for engine in ("jax", "ddp")
    )
    read = []
    for training in (ours, eager):
        training.steps(0, 2)
        read.append({n: t.clone() for n, t in training.net.state_dict().items()})
        with torch.no_grad():
            training.net.get_parameter("net.5.bias").fill_(0.25)
        training.steps(2)
    result = {"read": distance(*read, eager.start.model)}
    result["weights"] = distance(ours.state().model, eager.state().model, eager.start.model)
    scores = []
    for training in (ours, eager):

        class Loader:
            resident = False
            batches = training.batches

            def __iter__(self):
                return iter(self.batches)

        scores.append(evaluate(training.engine, training.model, training.spec, Loader(), 0).loss)
    return {**result, "scores": scores}


class Halved(nn.Module):
    """Has parameters in 16 bits, and puts a new tensor into a buffer in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).bfloat16()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return self.linear(x.bfloat16()).float()


class HalvedSpec:
    @staticmethod
    def loss(net: nn.Module, batch: Any) -> torch.Tensor:
        return net(batch[0]).square().mean()

    score = loss


def halved() -> dict:
    """Train a net in 16 bits, which is evaluated in between, beside plain AdamW."""
    task = resolved_task("jax", "--amp_level=O0", "--ema_decay=0.5", "--lr=1e-1")
    torch.manual_seed(0)
    net = Halved()
    plain = copy.deepcopy(net)
    entry = optimizers.of_task(task)
    theirs = entry.torch_class(plain.parameters(), **entry.arguments(task))
    engine = open_engine(task)
    model = engine.prepared(net)
    ours = engine.build_optimizer(model)
    for batch in torch.randn(3, 1, 8, 4):
        engine.run_step(train_step, model, HalvedSpec, ours, batch)
        with torch.no_grad():
            engine.run_score(model, HalvedSpec, batch)
        theirs.zero_grad()
        HalvedSpec.loss(plain, batch).backward()
        theirs.step()
    state = engine.training_state(net, ours)
    moments = [t for kept in ours.state.values() for key, t in kept.items() if key != "step"]
    return {
        "seen": state.model["seen"].item(),
        "dtypes": sorted({str(t.dtype) for t in (*net.parameters(), *moments)}),
        "away": max(
            (a - b).abs().max().item()
            for a, b in zip(net.parameters(), plain.parameters(), strict=True)
        ),
    }


def without_cudnn() -> dict:
    """Ask for cuDNN's attention where there is none."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    flags = (
        "--amp_dtype=bfloat16", "--jax.lean=on", "--jax.attention=cudnn", "--lr=1e-3",
        "--image_size=32",
    )  # fmt: skip
    return {**compare_with_eager("tests.nets:shallow_vit", *flags), "told": told}


TRIED = {
    "resnet": lambda: compare_with_float64(
        "resnet10", "--image_size=32", "--weight_decay=0", "--momentum=0.9", "--lr=1e-2"
    ),
    "recipe": lambda: compare_with_eager(
        "tests.nets:tiny", "--amp_level=O0", "--accumulate=2", "--clip_norm=0.1", "--ema_decay=0.9",
        "--decay=matrices", "--weight_decay=0.1",
    ),
    "sgd": lambda: compare_with_eager(
        "tests.nets:tiny", "--amp_level=O0", "--optimizer=sgd", "--nesterov", "--momentum=0.8",
        "--weight_decay=0.1",
    ),
    "bfloat16": lambda: compare_with_eager("tests.nets:tied", "--amp_dtype=bfloat16"),
    "overflow": lambda: compare_with_eager("tests.nets:loud", "--amp_dtype=float16"),
    "keeps": lambda: compare_with_eager("tests.nets:keeps", "--amp_level=O0"),
    "skip": lambda: compare_with_eager("tests.nets:overflowing", "--amp_level=O0", "--on_nan=skip"),
    "shapes": lambda: compare_with_eager("tests.nets:Ragged", "--amp_level=O0"),
    "resumed": resumed,
    "written": written_from_outside,
    "without cudnn": without_cudnn,
    "halved": halved,
}  # fmt: skip


def main(names: list[str]) -> None:
    print(json.dumps({name: TRIED[name]() for name in names or TRIED}))


if __name__ == "__main__":
    main(sys.argv[1:])
