"""What a step through `accbench.accelerate` does beside a bare loop: counts, whatever the load.

    python benchmarks/research/accelerate_counts.py --model gpt2_tiny
    python benchmarks/research/accelerate_counts.py --model gpt2_tiny --workers 2
    python benchmarks/research/accelerate_counts.py --model resnet18

Printed are, a step of rank 0: torch's operations that differ in number, calls of Python functions,
pages that the kernel handed out, and its milliseconds. The third side has the heap that the C
library begins with.
"""

import argparse
import cProfile
import json
import os
import pstats
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIDES = {"bare": {}, "accelerate": {}, "accelerate, system's heap": {"ACCBENCH_MALLOC": "system"}}
PYTHON_STEPS, TORCH_STEPS, PAGE_STEPS, WARMUP = 4, 2, 10, 4


def child(side: str, model: str, folder: str) -> None:
    """Train in this process, and print what rank 0 counted as JSON."""
    import torch
    import workload
    from torch.utils.data import DataLoader, DistributedSampler

    workers = int(os.environ.get("WORLD_SIZE", "1"))
    steps = WARMUP + PYTHON_STEPS + TORCH_STEPS + PAGE_STEPS + 1
    case = workload.Case(model, False, workers, 1, 8, steps, WARMUP, False, folder, 0.0)
    torch.set_num_threads(1)
    net, samples, sampler = workload.build(case), workload.Samples(case), None
    optimizer, run = workload.optimizer(net), None
    if side == "bare" and workers > 1:
        torch.distributed.init_process_group("gloo")
        net = torch.nn.parallel.DistributedDataParallel(net)
        sampler = DistributedSampler(samples)
    loader = DataLoader(samples, case.batch_size, sampler=sampler)
    if side != "bare":
        import accbench

        run = accbench.accelerate(
            net, optimizer, loader, device="cpu", threads=1, output_dir=f"{folder}/run",
            tensorboard="off", warmup_steps=steps,
        )  # fmt: skip
        net, optimizer, loader = run
    net.train()
    batches = iter(loader)

    def train(num_steps: int) -> None:
        for _ in range(num_steps):
            inputs, targets = next(batches)
            optimizer.zero_grad()
            loss = workload.loss(net(inputs), targets)
            loss.backward() if run is None else run.backward(loss)
            optimizer.step()

    train(WARMUP)
    before = resource.getrusage(resource.RUSAGE_SELF)
    train(PAGE_STEPS)
    after = resource.getrusage(resource.RUSAGE_SELF)
    calls = cProfile.Profile()
    calls.runcall(train, PYTHON_STEPS)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(TORCH_STEPS)
    if os.environ.get("RANK", "0") == "0":
        counts = {e.key: e.count / TORCH_STEPS for e in profile.key_averages()}
        counts["calls of Python functions"] = pstats.Stats(calls).total_calls / PYTHON_STEPS
        counts["pages from the kernel"] = (after.ru_minflt - before.ru_minflt) / PAGE_STEPS
        counts["the kernel's ms"] = 1e3 * (after.ru_stime - before.ru_stime) / PAGE_STEPS
        print(json.dumps(counts), flush=True)
    os._exit(0)  # without the loader's rest


def count(side: str, model: str, workers: int, folder: Path) -> dict[str, float]:
    """Count one side's step in processes of its own."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "benchmarks" / "peers")))
    start = [] if workers == 1 else ["-m", "torch.distributed.run", "--standalone",
                                     f"--nproc_per_node={workers}"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, *start, __file__, "--side", side, "--model", model, str(folder)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **SIDES[side]},
        check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    counts: dict[str, float] = json.loads(line)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default="runs/accelerate_counts", type=Path)
    parser.add_argument("--model", choices=("gpt2_tiny", "resnet18", "vit_ti"), default="gpt2_tiny")
    parser.add_argument("--workers", type=int, choices=(1, 2), default=1)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # in a process of its own
    flags = parser.parse_args()
    if flags.side:
        child(flags.side, flags.model, str(flags.folder))
    found = {}
    for side in SIDES:
        at = flags.folder.absolute() / f"{flags.model}-{flags.workers}-{side.replace(' ', '_')}"
        at.mkdir(parents=True, exist_ok=True)
        found[side] = count(side, flags.model, flags.workers, at)
    print(f"| {flags.model}, {flags.workers} worker(s), a step | {' | '.join(found)} |")
    print(f"| --- |{' ---: |' * len(found)}")
    for name in dict.fromkeys(name for counts in found.values() for name in counts):
        values = [counts.get(name, 0.0) for counts in found.values()]
        if len(set(values)) > 1:
            print(f"| {name} | {' | '.join(f'{value:,.1f}' for value in values)} |")


if __name__ == "__main__":
    main()
