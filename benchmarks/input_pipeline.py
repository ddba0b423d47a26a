"""The input pipeline alone: images/s a core, from JPEG files to batches on the host.

    python benchmarks/input_pipeline.py [--data mock] [--workers 0,1,2]

Decoding alone (Pillow, the same files, one thread) runs in turns with the
pipeline and is its limit.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from PIL import Image

from accbench import config, plugins
from accbench.process_group import Topology


def loader_of(data: str, workers: int, image_size: int):
    """accbench's training loader."""
    task = config.resolve(
        config.parse(
            [f"--data={data}", f"--workers={workers}", "--batch_size=32", "--threads=1",
             f"--image_size={image_size}", "--device=cpu"]
        )
    )  # fmt: skip
    name, location = config.data_name(data)
    return plugins.load("data", name)(location, task, task.options.get(name), Topology())


def pipeline_rate(loader) -> float:
    """Images/s over one epoch, from the first batch on, so that start-up does not count."""
    batches = iter(loader)
    next(batches)
    started = time.perf_counter()
    count = sum(len(labels) for _, labels in batches)
    return count / (time.perf_counter() - started)


def decode_rate(paths: list[str]) -> float:
    """Images/s of Pillow's decoder on one thread."""
    started = time.perf_counter()
    for path in paths:
        with Image.open(path) as image:
            image.convert("RGB")
    return len(paths) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="mock")
    parser.add_argument("--workers", default="0,1,2")
    parser.add_argument("--image_size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=5)
    flags = parser.parse_args()
    counts = [int(count) for count in flags.workers.split(",")]
    sources = {count: loader_of(flags.data, count, flags.image_size) for count in counts}
    loaders = {count: source.train_loader() for count, source in sources.items()}
    paths = [path for path, _ in sources[counts[0]].train_set.samples]
    for loader in loaders.values():
        pipeline_rate(loader)  # starts the worker processes
    decode: list[float] = []
    rates: dict[int, list[float]] = {count: [] for count in counts}
    for epoch in range(flags.rounds):
        decode.append(decode_rate(paths))
        for count, loader in loaders.items():
            loader.set_epoch(epoch)
            rates[count].append(pipeline_rate(loader))
    print(f"{len(paths)} images, {flags.image_size} px, {flags.rounds} rounds, median (min to max)")
    print(f"decoding alone, 1 thread       {spread(decode)} images/s")
    for count, found in rates.items():
        cores = max(1, count)
        share = statistics.median(found) / cores / statistics.median(decode)
        print(
            f"pipeline, {count} worker processes  {spread(found)} images/s, "
            f"{statistics.median(found) / cores:.0f} a core, {share:.0%} of decoding"
        )


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):6.0f} ({min(values):.0f} to {max(values):.0f})"


if __name__ == "__main__":
    main()
