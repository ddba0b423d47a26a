"""Two nodes with a launcher each beside one node with as many workers, engine by engine.

    python benchmarks/two_nodes.py [--engines ddp,inductor,xla,jax] [--workers 1,2] [--tiny]

The nodes are network namespaces with an address each (root and iproute2), else two launchers on
the loopback. Six steps of a small net on synthetic data; both runs must end well and have the
same losses, and the two nodes' record all ranks. Prints a row of Markdown for
each: the largest difference between the losses, and seconds of both runs.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from accbench.recording import records  # noqa: E402
from benchmarks.nodes import two_nodes  # noqa: E402
from benchmarks.smoke import add_tiny  # noqa: E402

FLAGS = (
    "--model=resnet10", "--image_size=32", "--batch_size=4", "--amp_level=O0", "--device=cpu",
    "--workers=0", "--threads=1", "--max_steps=6", "--log_interval=1", "--warmup_steps=1",
    "--data=synthetic", "--tensorboard=off",
)  # fmt: skip


def losses_of(run_dir: Path) -> list[float]:
    found = records.read(run_dir / "records.jsonl")
    return [record.loss for record in found if isinstance(record, records.WindowRecord)]


def row_of(engine: str, num_workers: int, folder: Path) -> str:
    one, two = folder / "one", folder / "two"
    flags = (*FLAGS, f"--engine={engine}")
    began = time.perf_counter()
    with two_nodes() as nodes:
        of_nodes = nodes.run(*flags, f"--nproc_per_node={num_workers}", f"--output_dir={two}")
        kind = "loopback" if nodes.names is None else "namespaces"
    two_s = time.perf_counter() - began
    for status, output, errors in of_nodes:
        if status:
            return f"| {engine} | {num_workers} | {kind} | failed: {(errors or output)[-300:]!r} |"
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "launch_single_task.py", *flags, f"--nproc_per_node={2 * num_workers}",
         f"--output_dir={one}"],
        cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    one_s = time.perf_counter() - began
    pairs = list(zip(losses_of(one), losses_of(two), strict=True))
    (header,) = (
        record for record in records.read(two / "records.jsonl")
        if isinstance(record, records.RunRecord)
    )  # fmt: skip
    assert header.world_size == 2 * num_workers
    largest = max(abs(a - b) / abs(a) for a, b in pairs)
    losses = "equal" if largest == 0 else f"{largest:.1e} apart"
    return f"| {engine} | {num_workers} | {kind} | {losses} | {one_s:.0f} | {two_s:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", default="ddp,inductor,xla,jax")
    parser.add_argument("--workers", default="1,2")
    add_tiny(parser)
    asked = parser.parse_args()
    if asked.tiny:
        asked.engines, asked.workers = "ddp", "1"
    print("| engine | workers a node | nodes | losses | one node, s | two nodes, s |")
    print("| --- | ---: | --- | --- | ---: | ---: |")
    for engine in asked.engines.split(","):
        for num_workers in map(int, asked.workers.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                print(row_of(engine, num_workers, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
