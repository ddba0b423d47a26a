"""Speed of the compiled engines as a share of DDP's, on a CPU, model by model.

    python benchmarks/engine_speed.py FOLDER [--settings NAME,...] [--repeats 5]
        [--engines ddp,inductor,xla,jax] [--report_only] [--tiny]

Each setting is one `accbench compare` of ddp, inductor, xla and jax, which runs them in turn, in
fresh processes, in an order shuffled anew each round; one compute thread a worker. A folder that
was begun is gone on with. Prints Markdown: geometric means over the rounds with their 95 %
intervals, and the seconds that compiling took in later rounds, from a cache where there is one.
Needs two cores with nothing else on them.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.smoke import TINY_RUN, add_tiny  # noqa: E402

MODELS = {
    "resnet50": ("--model=resnet50", "--image_size=128", "--batch_size=8", "--max_steps=17"),
    "vit_ti_16": ("--model=vit_ti_16", "--image_size=224", "--batch_size=8", "--max_steps=21"),
    "gpt2_tiny": ("--model=gpt2_tiny", "--seq_len=128", "--batch_size=8", "--max_steps=105"),
}
TYPES = {"float32": ("--amp_level=O0",), "bfloat16": ("--amp_level=O1", "--amp_dtype=bfloat16")}
SETTINGS = {
    f"{model}-{dtype}-{num_workers}": (
        *flags, *of_type, f"--nproc_per_node={num_workers}",
    )
    for num_workers in (1, 2) for dtype, of_type in TYPES.items() for model, flags in MODELS.items()
}  # fmt: skip
ALL = (
    "--threads=1", "--device=cpu", "--data=synthetic", "--workers=0", "--warmup_steps=5",
    "--log_interval=4", "--numerics_steps=0", "--no-input_round",
)  # fmt: skip


TINY_FLAGS = (*TINY_RUN, "--max_steps=6", "--warmup_steps=2", "--log_interval=2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--repeats", default="5")
    parser.add_argument("--engines", default="ddp,inductor,xla,jax", help="ddp is the first")
    parser.add_argument("--report_only", action="store_true")
    add_tiny(parser)
    flags = parser.parse_args()
    if flags.tiny:
        flags.settings, flags.repeats, flags.engines = "resnet50-float32-1", "2", "ddp,inductor"
    engines = flags.engines.split(",")
    print("| model, type, workers | " + " | ".join((*engines[1:], "compiling, s")) + " |")
    print("| --- " * (len(engines) + 1) + "|")
    for name in flags.settings.split(","):
        folder = flags.folder.absolute() / name
        if not flags.report_only:
            accbench("compare", f"--engines={flags.engines}", f"--output_dir={folder}",
                     f"--repeats={flags.repeats}", *SETTINGS[name], *ALL,
                     *(TINY_FLAGS if flags.tiny else ()))  # fmt: skip
        rows = json.loads(accbench("report", str(folder), "--format=json"))["rows"]
        by_name = {row["name"]: row for row in rows}
        cells = [share(by_name[engine]) for engine in engines[1:]]
        took = ", ".join(seconds(by_name[engine]["compile_warm_s"]) for engine in engines[1:])
        print(f"| {name.replace('-', ', ')} | " + " | ".join((*cells, took)) + " |", flush=True)


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def share(row: dict[str, Any]) -> str:
    if row["speedup"] is None:
        return row["verdict"]
    if row["speedup_ci95"] is None:
        return f"{row['speedup']:.3f}"
    low, high = row["speedup_ci95"]
    return f"{row['speedup']:.3f} ({low:.3f} to {high:.3f})"


def accbench(*arguments: str) -> bytes:
    command = [sys.executable, "-m", "accbench", *arguments]
    # compare's own status says whether all rows were judged.
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=arguments[0] == "report")
    return done.stdout


if __name__ == "__main__":
    main()
