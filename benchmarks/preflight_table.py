"""What steps compiled for absent GPUs need, move and at best do: the table of docs/cuda.md.

    python benchmarks/preflight_table.py [FOLDER] [--tiny]

Compiles ResNet-50 for three GPUs, one and eight of each, in both 16-bit types, by engine xla, and
for an H100 by engine jax, where a ViT and GPT-2 small (1,024 tokens a sample) go through both; each
takes half a minute on two cores.
Prints Markdown. With FOLDER the results are kept there, and what is there already is not compiled
again.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.smoke import add_tiny  # noqa: E402

RESNET, VIT, GPT = ("resnet50", 256), ("vit_b_16", 128), ("gpt2", 8)
TINY_NET = ("benchmarks.nets:tiny", 4)
MORE = {"gpt2": ("--seq_len=1024", "--data=synthetic"), TINY_NET[0]: ("--image_size=32",)}
ROWS = [
    (model, engine, gpu, num_gpus, dtype)
    for model, engine, gpus in (
        (RESNET, "xla", ("a100_80", "h100", "h200")), (RESNET, "jax", ("h100",)),
        (VIT, "xla", ("h100",)), (VIT, "jax", ("h100",)),
        (GPT, "xla", ("h100",)), (GPT, "jax", ("h100",)),
    )
    for gpu in gpus
    for num_gpus in (1, 8)
    for dtype in ("float16", "bfloat16")
]  # fmt: skip
TINY_ROWS = [(TINY_NET, "xla", "h100", 1, "float16")]
HEAD = (
    "model, batch", "engine", "GPU", "type", "GiB", "launches", "GB", "bound, ms",
    "at most, samples/s",
    "eager: GB", "bound, ms", "reduced early",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?")
    add_tiny(parser)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        print("| " + " | ".join(HEAD) + " |")
        print("| --- | --- | --- | --- " + "| ---: " * (len(HEAD) - 4) + "|")
        for (model, batch), engine, gpu, num_gpus, dtype in TINY_ROWS if asked.tiny else ROWS:
            path = folder / f"{model.replace(':', '-')}-{engine}-{gpu}-{num_gpus}-{dtype}.json"
            if not path.exists():
                flags = (
                    f"--model={model}", f"--batch_size={batch}", f"--engine={engine}",
                    f"--gpu={gpu}", f"--nproc_per_node={num_gpus}",
                    f"--amp_dtype={dtype}", "--format=json", *MORE.get(model, ()),
                )  # fmt: skip
                command = [sys.executable, "-m", "accbench", "preflight", *flags]
                done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
                path.write_bytes(done.stdout)
            found = json.loads(path.read_text())
            print("| " + " | ".join(cells(found, f"{num_gpus} x {gpu}", dtype)) + " |", flush=True)


def cells(found: dict[str, Any], gpus: str, dtype: str) -> list[str]:
    step, eager, reduction = found["step"], found["eager"], found["reduction"]
    return [
        f"{found['task']['model']}, {found['task']['batch_size']}", found["engine"],
        gpus, dtype,
        f"{found['memory']['peak_bytes'] / 2**30:.1f}",
        f"{step['launches']:,}",
        f"{step['bytes'] / 1e9:.1f}",
        f"{step['bound_s'] * 1e3:.1f}",
        f"{step['samples_per_s_at_most'] * found['num_gpus']:,.0f}",
        f"{eager['bytes'] / 1e9:.1f}" if eager else "-",
        f"{eager['bound_s'] * 1e3:.1f}" if eager else "-",
        f"{reduction['started_before_last_product']:.0%}" if reduction else "",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
