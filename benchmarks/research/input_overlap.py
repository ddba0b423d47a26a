"""How much of a training loop waits for data: DataLoaderX beside torch's plain loader.

    python benchmarks/research/input_overlap.py FILE.rec [--batches 60]

The step takes as long as its batch takes to make, measured first: as a sleep,
which is what the host sees of an accelerator's step, and as matrix products of
one thread, which compete for the machine.
"""

import argparse
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from accbench.data import Collate, decode
from accbench.data.loader import DataLoaderX
from accbench.data.recordio import RecordIODataset, Samples

BATCH = 32


def share_of_wait(batches: Iterable, step: Callable[[], None], num_batches: int) -> float:
    """Part of the wall time in which the loop waited for a batch, the first left out."""
    iterator = iter(batches)
    next(iterator)
    step()
    waited, begun = 0.0, time.perf_counter()
    for _ in range(num_batches):
        asked = time.perf_counter()
        next(iterator)
        waited += time.perf_counter() - asked
        step()
    return waited / (time.perf_counter() - begun)


def products(seconds: float) -> Callable[[], None]:
    """Matrix products that take so long alone."""
    matrix = torch.randn(256, 256)
    begun = time.perf_counter()
    for _ in range(200):
        matrix @ matrix
    count = round(seconds / ((time.perf_counter() - begun) / 200))

    def step() -> None:
        for _ in range(count):
            matrix @ matrix

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rec", type=Path)
    parser.add_argument("--batches", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dataset = RecordIODataset(arguments.rec)
    samples = Samples(dataset, decode.RandomView(224), 1 << 24)
    sampler = [index % len(dataset) for index in range(BATCH * (arguments.batches + 2))]
    common = {"dataset": samples, "batch_size": BATCH, "sampler": sampler, "collate_fn": Collate()}
    begun, count = time.perf_counter(), 0
    for _ in DataLoader(**common):
        count += 1
    batch_s = (time.perf_counter() - begun) / count
    print(f"a batch of {BATCH} takes {1e3 * batch_s:.1f} ms to make")
    steps = {"sleep": lambda: time.sleep(batch_s), "matrix products": products(batch_s)}
    loaders: dict[str, Callable[[], DataLoader]] = {
        "DataLoader": lambda: DataLoader(**common),
        "DataLoaderX": lambda: DataLoaderX(0, device="cpu", **common),
    }
    for what, step in steps.items():
        for name, make in loaders.items():
            share = share_of_wait(make(), step, arguments.batches)
            print(f"step of {1e3 * batch_s:.1f} ms ({what}), {name}: waits {share:.1%} of the wall")


if __name__ == "__main__":
    main()
