"""Memory of a rank that trains with PartialFC, beside one that has all classes.

    python benchmarks/partial_fc_memory.py [--tiny]

Four ranks train ArcFace's head of 40,000 classes behind one convolution with SGD for three steps.
Prints a table: the state that rank 0 keeps between steps, and the peak of its anonymous memory in
a step over what it has between them. The C library is told to give back what is freed.
"""

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.sharding_memory import measure, train, watched_peak  # noqa: E402
from benchmarks.smoke import add_tiny  # noqa: E402

RATES: dict[str, tuple[str, ...]] = {
    "whole head": (),
    "sample_rate 1": ("--arcface.sample_rate=1",),
    "sample_rate 0.1": ("--arcface.sample_rate=0.1",),
}
NUM_CLASSES, TINY_CLASSES, BATCH = 40_000, 2_000, 64


def build(spec: Any, num_classes: int) -> Any:
    """Return ArcFace's head behind one convolution, for images of 16 pixels."""
    from torch import nn

    model = spec.build_of((1, 1, 1, 1), num_classes)
    model.net.trunk = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.GroupNorm(2, 8))
    model.net.embed = nn.Sequential(nn.Flatten(), nn.Linear(128, 512))
    return model


def rank(way: str, num_classes: int, out: Path) -> None:
    """Train on one rank, and write what rank 0 found."""
    import torch

    from accbench import config, models, resolving
    from accbench.config import plugins
    from accbench.distributed import process_group
    from accbench.distributed.process_group import Topology
    from accbench.training import worker

    topology = Topology.from_env()
    task = resolving.resolve(
        config.parse([*RATES[way], "--model=arcface_r18", "--image_size=16", "--device=cpu",
                      "--data=synthetic", "--amp_level=O0", f"--batch_size={BATCH}",
                      "--optimizer=sgd", "--threads=1"])
    )  # fmt: skip
    torch.set_num_threads(1)
    process_group.init_distributed(topology, "cpu", 300)
    engine = plugins.load("engines", "ddp")(task, task.options["ddp"], topology)
    spec = models.of_task(task)
    model = worker.build_model(engine, lambda: build(spec, num_classes))[1]
    optimizer = engine.build_optimizer(model)
    gc.collect()
    with watched_peak() as peak:
        train(engine, model, spec, optimizer, num_classes)
        found = {"peak_bytes": peak(), "state_bytes": engine.state_bytes(optimizer)}
    if topology.rank == 0:
        out.write_text(json.dumps(found))
    process_group.close()


def main() -> int:
    """Print the table, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_tiny(parser)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is not None:
        rank(asked.rank, TINY_CLASSES if asked.tiny else NUM_CLASSES, asked.out)
        return 0
    print("| | state MiB | peak of a step, MiB |\n| --- | ---: | ---: |")
    for way in [*RATES][-1:] if asked.tiny else RATES:
        of = measure(__file__, way, asked.tiny)
        print(f"| {way} | {of['state_bytes'] / 2**20:.1f} | {of['peak_bytes'] / 2**20:.0f} |",
              flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
