"""What a step costs the host, traced and replayed, in turns within one process.

    python benchmarks/research/replay_host_time.py --model resnet18 --image_size 32 --batch_size 2

Host time is the main thread's CPU time in `Engine.run_step`, device time the
wall-clock time of the whole step less that; the host waits for the device after
every step, so the two do not overlap.
"""

import argparse
import json
import os
import statistics
import time
from typing import Any

import torch

from accbench import models
from accbench.config import TaskConfig
from accbench.distributed.process_group import Topology
from accbench.engines.xla import Engine
from accbench.training.train_loop import train_step

WARMUP_STEPS = 4  # two recordings, then two replays


def main() -> None:
    """Print a line a mode, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--image_size", type=int, default=32)
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument("--amp_level", default="O0")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each mode")
    parser.add_argument("--steps", type=int, default=10, help="steps a turn")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    os.environ.setdefault("PJRT_DEVICE", flags.device.upper())
    trainers = {mode: Trainer(mode, flags) for mode in ("traced", "replayed")}
    for _ in range(flags.rounds):
        for trainer in trainers.values():
            trainer.take_steps(flags.steps)
    for mode, trainer in trainers.items():
        result = trainer.summary()
        if flags.json:
            print(json.dumps({"mode": mode, **result}))
        else:
            print(
                f"{mode:<8}  host {result['host_ms']:.2f} ms a step (median; "
                f"quartiles {result['host_ms_low']:.2f}, {result['host_ms_high']:.2f}), "
                f"device {result['device_ms']:.1f} ms, replayed {result['replayed']}, "
                f"last loss {result['loss']}"
            )
    losses = [trainer.losses for trainer in trainers.values()]
    print(f"losses the same, bit for bit, in {len(losses[0])} steps: {losses[0] == losses[1]}")


class Trainer:
    """A model that trains in one mode, on one random batch."""

    def __init__(self, mode: str, flags: argparse.Namespace) -> None:
        task = TaskConfig(
            engine="xla", device=flags.device, batch_size=flags.batch_size, threads=1,
            amp_level=flags.amp_level,
            amp_dtype="float16" if flags.device == "cuda" else "bfloat16",
        )  # fmt: skip
        options = Engine.Options(replay="on" if mode == "replayed" else "off")
        self.engine = Engine(task, options, Topology())
        self.spec = models.resolve(flags.model, flags.image_size)
        torch.manual_seed(0)
        self.model = self.engine.prepare(self.spec.build(1000))
        self.optimizer = self.engine.build_optimizer(self.model)
        shape_NCHW = (flags.batch_size, 3, flags.image_size, flags.image_size)
        self.batch = self.engine.to_device(
            (torch.randint(0, 256, shape_NCHW, dtype=torch.uint8), torch.arange(flags.batch_size))
        )
        self.host_s: list[float] = []
        self.step_s: list[float] = []
        self.losses: list[float] = []
        self.take_steps(WARMUP_STEPS)
        self.host_s.clear()
        self.step_s.clear()

    def take_steps(self, num_steps: int) -> None:
        """Train, timing each step."""
        self.model.train()
        for _ in range(num_steps):
            started, cpu_started = time.perf_counter(), time.thread_time()
            loss = self.engine.run_step(
                train_step, self.model, self.spec, self.optimizer, self.batch
            )
            self.host_s.append(time.thread_time() - cpu_started)
            self.engine.wait()
            self.step_s.append(time.perf_counter() - started)
            self.losses.append(loss.cpu().item())

    def summary(self) -> dict[str, Any]:
        """Medians in milliseconds."""
        low, host, high = statistics.quantiles(self.host_s, n=4)
        return {
            "host_ms": 1e3 * host,
            "host_ms_low": 1e3 * low,
            "host_ms_high": 1e3 * high,
            "device_ms": 1e3 * (statistics.median(self.step_s) - host),
            "replayed": self.engine.num_replayed,
            "loss": self.losses[-1],
        }


if __name__ == "__main__":
    main()
