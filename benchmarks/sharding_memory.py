"""Memory of a rank that trains with `--dp_shard`, beside plain ddp's.

    python benchmarks/sharding_memory.py [--tiny] [--ways "ddp,zero 3"]

Four ranks train a Llama of 34 million parameters with AdamW for three steps, by every stage of
ZeRO and in tensor slices, where ranks share a batch. A rank's peak is that of its anonymous memory
over what it had before the model was built; the C library is told to give back what is freed, or
its habits would be measured. Prints a table of rank 0's peaks, and of the state it keeps between
steps.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.processes import run_ranks  # noqa: E402
from benchmarks.smoke import add_tiny  # noqa: E402

MALLOC = {
    "ACCBENCH_MALLOC": "system", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}  # fmt: skip
WAYS: dict[str, tuple[str, ...]] = {
    "ddp": (),
    "zero 1": ("--dp_shard=auto", "--zero=1"),
    "zero 2": ("--dp_shard=auto", "--zero=2"),
    "zero 3": ("--dp_shard=auto", "--zero=3"),
    "tp 2": ("--tp=2",),
    "tp 2 x zero 1": ("--tp=2", "--dp_shard=auto", "--zero=1"),
    "tp 2 x zero 3": ("--tp=2", "--dp_shard=auto", "--zero=3"),
    "tp 4": ("--tp=4",),
}
STEPS, BATCH, TOKENS, NUM_RANKS = 3, 1, 64, 4
# Layers, width, vocabulary.
SIZES, TINY_SIZES = (8, 512, 8192), (2, 64, 512)


def anonymous_bytes() -> int:
    """Return this process's resident memory that belongs to no file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon")


@contextmanager
def watched_peak() -> Iterator[Callable[[], int]]:
    """Watch anonymous memory in the block; yields a function that returns the peak over it."""
    begin, ended = anonymous_bytes(), threading.Event()
    most = [begin]

    def watch() -> None:
        while not ended.is_set():
            most[0] = max(most[0], anonymous_bytes())
            time.sleep(0.002)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lambda: most[0] - begin
    finally:
        ended.set()
        thread.join()


def train(engine: Any, model: Any, spec: Any, optimizer: Any, num_classes: int) -> None:
    """Train for `STEPS` steps on batches of a data rank's own."""
    import torch

    from accbench.training.train_loop import train_step

    data = engine.mesh.data_topology(engine.topology)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(data.rank + step * NUM_RANKS)
        batch = spec.synthetic_batch(engine.task.batch_size, num_classes, generator)
        engine.run_step(train_step, model, spec, optimizer, batch)


def measure(script: str, way: str, tiny: bool) -> dict[str, int]:
    """Run a script's ranks one way, and return what rank 0 measured of itself."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        arguments = [script, f"--rank={way}", f"--out={out}"]
        run_ranks(NUM_RANKS, arguments + ["--tiny"] * tiny, {**os.environ, **MALLOC})
        measured: dict[str, int] = json.loads(out.read_text())
        return measured


def build(sizes: tuple[int, int, int]) -> Any:
    """Return the model's spec."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from accbench.models.tasks.language import LanguageModel, options_of_transformers

    layers, width, vocabulary = sizes

    def network(num_tokens: int) -> Any:
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=num_tokens, hidden_size=width, intermediate_size=width * 11 // 4,
                num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=8,
                **options_of_transformers(),
            )
        )  # fmt: skip

    return LanguageModel("llama", network, vocabulary, seq_len=TOKENS)


def rank(way: str, sizes: tuple[int, int, int], out: Path) -> None:
    """Train on one rank, and write what rank 0 found."""
    import torch

    from accbench import config, resolving
    from accbench.config import plugins
    from accbench.distributed import process_group
    from accbench.distributed.process_group import Topology
    from accbench.training import worker

    topology = Topology.from_env()
    task = resolving.resolve(
        config.parse([*WAYS[way], "--device=cpu", "--data=synthetic", "--amp_level=O0",
                      f"--batch_size={BATCH}", "--threads=1"])
    )  # fmt: skip
    torch.set_num_threads(1)
    process_group.init_distributed(topology, "cpu", 300)
    engine = plugins.load("engines", "ddp")(task, task.options["ddp"], topology)
    engine.strategy.prove()
    spec = build(sizes)
    with watched_peak() as peak:
        _, model = worker.build_model(engine, lambda: spec.build(sizes[2]))
        optimizer = engine.build_optimizer(model)
        train(engine, model, spec, optimizer, sizes[2])
        found = {"peak_bytes": peak(), "state_bytes": engine.state_bytes(optimizer)}
    if topology.rank == 0:
        out.write_text(json.dumps(found))
    process_group.close()


def main() -> int:
    """Print the table, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_tiny(parser)
    parser.add_argument("--ways", default=",".join(WAYS), help="ddp and others, comma-separated")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank is not None:
        rank(asked.rank, TINY_SIZES if asked.tiny else SIZES, asked.out)
        return 0
    found = {}
    for way in ["ddp", "zero 3"] if asked.tiny else asked.ways.split(","):
        found[way] = measure(__file__, way, asked.tiny)
        print(way, found[way], flush=True)
    print("| | peak MiB | of ddp's | state MiB |\n| --- | ---: | ---: | ---: |")
    for way, of in found.items():
        share = of["peak_bytes"] / found["ddp"]["peak_bytes"]
        print(f"| {way} | {of['peak_bytes'] / 2**20:.0f} | {share:.0%} | "
              f"{of['state_bytes'] / 2**20:.1f} |")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
