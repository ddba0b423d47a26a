"""How training scales from one worker to two on this CPU, and what takes the rest.

    python benchmarks/scaling.py [--rounds 5] [--engines ddp,xla] [--steps 60] [--tiny]

A ResNet-18 at 96 px, one compute thread a worker, so that two workers have twice the cores. Each
round runs in turn, in fresh processes: one worker by itself; two by themselves, side by side, which
share caches, memory and clock but reduce nothing; and two that reduce. Needs two cores with nothing
else on them. Prints Markdown: geometric means over the rounds and their 95 % intervals.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from accbench.report import run as runs  # noqa: E402
from accbench.report.statistics import mean_with_interval  # noqa: E402
from benchmarks.scaling_fit import BUCKET_BYTES, Cluster, Link, TrainingStep, scale_step  # noqa: E402
from benchmarks.smoke import add_tiny  # noqa: E402

WARMUP_STEPS = 20
FLAGS = (
    "--model=resnet18", "--image_size=96", "--batch_size=8", "--amp_level=O0", "--device=cpu",
    "--data=synthetic", "--workers=0", "--threads=1", f"--warmup_steps={WARMUP_STEPS}",
    "--epochs=1000", "--save_interval=0", "--eval_interval=0", "--tensorboard=off",
)  # fmt: skip
# Replay is for one worker alone: both sides are to run the same.
FLAGS_OF_ENGINE = {"xla": ("--xla.replay=off",)}
GRADIENT_BYTES = 4 * 11_689_512  # of ResNet-18
CASES = ("one", "beside", "two")


TINY_FLAGS = ("--image_size=32", "--batch_size=2")


def start(
    engine: str, num_workers: int, cores: str, steps: int, folder: Path, more: tuple[str, ...]
) -> subprocess.Popen:
    return subprocess.Popen(
        ["taskset", "-c", cores, sys.executable, str(ROOT / "launch_single_task.py"), *FLAGS,
         *FLAGS_OF_ENGINE.get(engine, ()), *more, f"--engine={engine}",
         f"--nproc_per_node={num_workers}", f"--max_steps={WARMUP_STEPS + steps}",
         f"--output_dir={folder}"],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip


def step_s(engine: str, case: str, steps: int, folder: Path, more: tuple[str, ...]) -> float:
    """Return the seconds of a step; of two workers side by side the mean."""
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))[:2]]
    if case == "two":
        started = {folder: start(engine, 2, ",".join(cores), steps, folder, more)}
    else:
        started = {
            folder / core: start(engine, 1, core, steps, folder / core, more)
            for core in (cores[:1] if case == "one" else cores)
        }
    statuses = [process.wait() for process in started.values()]
    if any(statuses):
        raise SystemExit(f"{engine}, {case}: exit status {statuses}")
    rates = [runs.read(at).steps_per_s for at in started]
    return len(rates) / sum(rate for rate in rates if rate)


def reduce_for_parent() -> None:
    """One of two processes: the seconds in which Gloo averages all gradients in buckets."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    whole, rest = divmod(GRADIENT_BYTES, BUCKET_BYTES)
    tensors = [torch.ones(size // 4) for size in [BUCKET_BYTES] * whole + [rest]]
    found = []
    for _ in range(20):
        dist.barrier()
        begun = time.perf_counter()
        for tensor in tensors:
            dist.all_reduce(tensor)
        found.append(time.perf_counter() - begun)
    if dist.get_rank() == 0:
        print(json.dumps(sorted(found)[len(found) // 2]))
    dist.destroy_process_group()


def reduction_s() -> float:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc_per_node=2", __file__, "--reduce"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
    return float(done.stdout.split()[-1])


def predicted_s(alone_s: float, reducing_s: float) -> float:
    """Two workers' step. Cores that compute cannot reduce meanwhile, so nothing hides."""
    link = Link(GRADIENT_BYTES / reducing_s, 0.0, 0.0)
    here = Cluster(2, link, link, ring_start_s=0.0, algorithms=("ring",))
    return scale_step(TrainingStep(alone_s, GRADIENT_BYTES, overlaps=False), here, 2).step_s


def with_interval(ratios: list[float]) -> str:
    mean, (low, high) = mean_with_interval(ratios)
    # One round has no spread.
    return f"{mean:.3f}" if len(ratios) < 2 else f"{mean:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engines", default="ddp,xla")
    parser.add_argument("--steps", type=int, default=60, help="that count, after 20 of warm-up")
    parser.add_argument("--reduce", action="store_true", help=argparse.SUPPRESS)
    add_tiny(parser)
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.rounds, arguments.engines, arguments.steps = 1, "ddp", 10
    if arguments.reduce:
        return reduce_for_parent()
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("two workers need two cores; this process may use one")
    print(f"load before the first run: {os.getloadavg()[0]:.1f}", file=sys.stderr)
    engines = arguments.engines.split(",")
    found: dict[str, list[dict[str, float]]] = {engine: [] for engine in engines}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            for engine in engines:
                times = {}
                for case in CASES[:: -1 if number % 2 else 1]:
                    at = Path(folder) / f"{number}-{engine}-{case}"
                    times[case] = step_s(
                        engine, case, arguments.steps, at, TINY_FLAGS if arguments.tiny else ()
                    )
                times["reduction"] = reduction_s()
                found[engine].append(times)
                print(engine, {k: round(v, 4) for k, v in times.items()}, file=sys.stderr)
    head = ("engine", "one, ms", "side by side, ms", "two, ms", "gloo by itself, ms", "efficiency",
            "of which sharing a machine", "of which reducing", "predicted")  # fmt: skip
    print("| " + " | ".join(head) + " |\n| --- " + "| ---: " * (len(head) - 1) + "|")
    for engine, rounds in found.items():
        print("| " + " | ".join([engine, *cells(rounds)]) + " |")
    return None


def cells(rounds: list[dict[str, float]]) -> list[str]:
    """Efficiency is the product of what sharing the machine leaves and what reducing leaves."""
    middle = [
        f"{1e3 * mean_with_interval([times[key] for times in rounds])[0]:.1f}"
        for key in (*CASES, "reduction")
    ]
    predicted = [t["one"] / predicted_s(t["beside"], t["reduction"]) for t in rounds]
    return [
        *middle,
        with_interval([t["one"] / t["two"] for t in rounds]),
        with_interval([t["one"] / t["beside"] for t in rounds]),
        with_interval([t["beside"] / t["two"] for t in rounds]),
        f"{mean_with_interval(predicted)[0]:.3f}",
    ]


if __name__ == "__main__":
    main()
