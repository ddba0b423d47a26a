"""What an engine costs over a bare hand-written loop of the same model, data and settings.

    python benchmarks/engine_overhead.py --engine ddp
    python benchmarks/engine_overhead.py --engine ddp --nproc_per_node 2
    python benchmarks/engine_overhead.py --engine xla
    python benchmarks/engine_overhead.py --engine xla --nproc_per_node 2
    python benchmarks/engine_overhead.py --tiny

Both sides run in one process, in turns of a few steps (A B, B A, ...), on fixed
batches. Where its memory lies can make one side of a process faster by some percent
for as long as the process lives, so all is repeated in fresh processes, in which the
two sides are built in either order by turns. Printed is the ratio of their times: the
geometric mean of the processes' medians, and its 95 % interval by Student's t.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from accbench import config, launchers, models, resolving
from accbench.config import TaskConfig, plugins
from accbench.distributed import process_group
from accbench.distributed.process_group import Topology
from accbench.report.statistics import mean_with_interval
from accbench.training.step_timer import StepTimer
from accbench.training.train_loop import train_step
from accbench.training.worker import apply_environment
from benchmarks.smoke import add_tiny


class Nobody:
    """Listens to a timer and does nothing."""

    def step(self, num_steps: int) -> None: ...

    def window(self, record: object) -> None: ...


def engine_turn(engine, spec, num_classes: int, loader) -> Callable[[int], None]:
    """A turn of the training loop as accbench runs it, timer included."""
    model = engine.prepare(spec.build(num_classes))
    optimizer = engine.build_optimizer(model)
    timer = StepTimer(engine, time.perf_counter(), Nobody())

    def turn(num_steps: int) -> None:
        timer.start(0)
        for batch in timer.batches(islice(engine.device_batches(loader), num_steps)):
            timer.step_done(engine.run_step(train_step, model, spec, optimizer, batch))
        timer.close_window()

    return turn


def bare_eager_turn(task, topology: Topology, net, batches) -> Callable[[int], None]:
    """PyTorch as its tutorials write it, with the settings of the engine ddp."""
    device = torch.device(task.device, topology.local_rank if task.device == "cuda" else None)
    net = net.to(device, memory_format=torch.channels_last)
    if topology.world_size > 1:
        net = DistributedDataParallel(net, broadcast_buffers=False, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=task.lr, fused=True)
    on_device = [
        (x.to(device, memory_format=torch.channels_last), y.to(device)) for x, y in batches
    ]
    dtype = getattr(torch, task.amp_dtype)

    def turn(num_steps: int) -> None:
        for step in range(num_steps):
            images, labels = on_device[step % len(on_device)]
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, dtype=dtype, enabled=task.amp_level == "O1"):
                logits = net(images)
            loss = functional.cross_entropy(logits.float(), labels)
            loss.backward()
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        loss.item()

    return turn


def bare_xla_turn(task, topology: Topology, net, batches) -> Callable[[int], None]:
    """torch_xla as its tutorials write it; two workers on a CPU average through gloo."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    from torch_xla.amp import syncfree

    device = torch_xla.device()
    net = net.to(device)
    parameters = list(net.parameters())
    optimizer = syncfree.AdamW(parameters, lr=task.lr)
    no_overflow = torch.zeros(()).to(device)
    on_device = [(x.to(device), y.to(device)) for x, y in batches]
    autocast = (
        torch.autocast("xla", dtype=getattr(torch, task.amp_dtype))
        if task.amp_level == "O1"
        else contextlib.nullcontext()
    )

    def average_gradients() -> None:
        flat = torch.cat([p.grad.reshape(-1) for p in parameters])
        optimizer.zero_grad(set_to_none=True)  # or the graph would compute each one for itself
        torch_xla.sync()
        on_host = flat.cpu()
        dist.all_reduce(on_host)
        flat = on_host.div_(topology.world_size).to(device)
        parts = flat.split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    def turn(num_steps: int) -> None:
        for step in range(num_steps):
            images, labels = on_device[step % len(on_device)]
            with autocast:  # logits that had a name would be a result of the graph, and kept
                loss = functional.cross_entropy(net(images).float(), labels)
            loss.backward()
            loss = loss.detach()
            if topology.world_size > 1:
                average_gradients()
            optimizer.step(found_inf=no_overflow)
            optimizer.zero_grad(set_to_none=True)  # as with the logits
            torch_xla.sync()
        xm.wait_device_ops()
        loss.item()

    return turn


SIDES = ("engine", "bare")
BARE = {"ddp": bare_eager_turn, "xla": bare_xla_turn}


def measure(
    sides: list[Callable[[int], None]], turns: int, num_steps: int
) -> tuple[list[list[float]], list[list[float]]]:
    """Wall seconds, and the main thread's CPU seconds, of each turn of each side.

    Which side is first alternates.
    """
    wall_s: list[list[float]] = [[], []]
    host_s: list[list[float]] = [[], []]
    for number in range(turns):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            process_group.all_gather_values([0.0])  # no rank begins before the others are done
            started, host_started = time.perf_counter(), time.thread_time()
            sides[side](num_steps)
            wall_s[side].append(time.perf_counter() - started)
            host_s[side].append(time.thread_time() - host_started)
    return wall_s, host_s


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=BARE, default="ddp")
    parser.add_argument("--nproc_per_node", type=int, default=1, help="workers")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--image_size", type=int, default=64)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--amp_level", default="O0")
    parser.add_argument("--processes", type=int, default=10, help="fresh starts")
    parser.add_argument("--turns", type=int, default=8, help="of each side in a process")
    parser.add_argument("--steps", type=int, default=10, help="steps a turn")
    parser.add_argument("--replay", default="auto", help="xla's; off traces every step")
    parser.add_argument("--bare_first", type=int, help=argparse.SUPPRESS)  # in a worker
    add_tiny(parser)
    flags = parser.parse_args()
    if flags.tiny:
        flags.model, flags.image_size, flags.batch_size = "resnet10", 32, 2
        flags.processes = flags.turns = 1
        flags.steps = 2
    return flags


def worker(flags: argparse.Namespace) -> None:
    """Measure in this process; rank 0 prints what it found as JSON."""
    topology = Topology.from_env()
    task = resolving.resolve(
        config.parse(
            [f"--engine={flags.engine}", f"--model={flags.model}", "--data=synthetic",
             f"--image_size={flags.image_size}", f"--batch_size={flags.batch_size}",
             f"--amp_level={flags.amp_level}", f"--nproc_per_node={topology.local_world_size}",
             f"--warmup_steps={flags.steps}", f"--log_interval={flags.steps}",
             f"--xla.replay={flags.replay}"]
        )
    )  # fmt: skip
    apply_environment(task, topology)
    process_group.init_distributed(topology, task.device, task.timeout_s)
    engine = plugins.load("engines", task.engine)(task, task.options[task.engine], topology)
    source = plugins.load("data", "synthetic")(None, task, task.options["synthetic"], topology)
    spec = models.of_task(task)

    def build(bare: bool) -> Callable[[int], None]:
        if not bare:
            return engine_turn(engine, spec, source.num_classes, source.train_loader())
        net = spec.build(source.num_classes)
        return BARE[task.engine](task, topology, net, source.batches)

    built = {bare: build(bare) for bare in (bool(flags.bare_first), not flags.bare_first)}
    sides = [built[False], built[True]]
    num_compiles = []
    for side in sides:  # compilation and caches
        before = engine.compile_stats().num_compiles
        side(flags.steps)
        num_compiles.append(engine.compile_stats().num_compiles - before)
    measure(sides, turns=2, num_steps=flags.steps)
    (of_engine, of_bare), host_s = measure(sides, flags.turns, flags.steps)
    host_ms = [1e3 * statistics.median(side) / flags.steps for side in host_s]
    if topology.rank == 0:
        ratios = [a / b for a, b in zip(of_engine, of_bare, strict=True)]
        answer = {
            "ratio": statistics.median(ratios),
            "engine_ms": 1e3 * statistics.median(of_engine) / flags.steps,
            "bare_ms": 1e3 * statistics.median(of_bare) / flags.steps,
            **{f"{side}_host_ms": ms for side, ms in zip(SIDES, host_ms, strict=True)},
            **{f"{side}_compiles": n for side, n in zip(SIDES, num_compiles, strict=True)},
            "threads": task.threads,
        }
        print(json.dumps(answer), flush=True)
    process_group.close()


def main() -> None:
    flags = parse_flags()
    if flags.bare_first is not None:
        worker(flags)
        return
    found = []
    for number in range(flags.processes):
        command = [
            sys.executable, "-m", "torch.distributed.run",
            f"--nproc_per_node={flags.nproc_per_node}", "--standalone",
            __file__, *sys.argv[1:], f"--bare_first={number % 2}",
        ]  # fmt: skip
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True,
            env={**launchers.common_env(TaskConfig(device="cpu", threads=1)), **os.environ},
        )  # fmt: skip
        found.append(json.loads(done.stdout.splitlines()[-1]))
        print(found[-1], file=sys.stderr)
    ratio, (low, high) = mean_with_interval([one["ratio"] for one in found])
    host_ms = [statistics.mean(one[f"{side}_host_ms"] for one in found) for side in SIDES]
    print(
        f"{flags.engine}, {flags.nproc_per_node} worker(s), {flags.model} {flags.image_size} px, "
        f"batch {flags.batch_size}, {flags.amp_level}, {found[0]['threads']} threads: "
        f"{statistics.median(one['engine_ms'] for one in found):.1f} ms a step, "
        f"bare loop {statistics.median(one['bare_ms'] for one in found):.1f} ms; "
        f"ratio {ratio:.4f}, 95 % interval {low:.4f} to {high:.4f}, "
        f"{flags.processes} processes of {flags.turns} turns of {flags.steps} steps; "
        f"main thread {host_ms[0]:.2f} ms a step, bare loop's {host_ms[1]:.2f}, means"
    )


if __name__ == "__main__":
    main()
