"""The bounds that stand beside a GPU's results, by `accbench preflight`.

    python -m benchmarks.gpu_parts.bounds FOLDER [--gpu h100 ...]

compiles the steps of gpu_day.py for GPUs that are not here, keeps each result in FOLDER, does not
compile again what is there, and writes bounds.json beside this file. It needs what preflight does;
the plugin should be that of the JAX that the GPU's machine has. A step takes minutes on two cores.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.models import MODELS, PREFLIGHT_FLAGS

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("bounds.json")
_DTYPES = ("bfloat16", "float16")


def command(gpu: str, key: str, dtype: str) -> list[str]:
    """Return the words behind `accbench` that give a step's bound."""
    model = MODELS[key]
    return [
        "preflight", "--engine=jax", f"--gpu={gpu}", f"--model={model.name}", *model.size,
        f"--batch_size={model.batch_size}", f"--amp_dtype={dtype}", *PREFLIGHT_FLAGS.get(key, ()),
        "--format=json",
    ]  # fmt: skip


def read() -> list[dict[str, Any]]:
    """Return the committed rows."""
    rows: list[dict[str, Any]] = json.loads(FILE.read_text())["rows"]
    return rows


def samples_per_s(rows: list[dict[str, Any]], gpu_name: str, row: dict[str, Any]) -> float | None:
    """Return the most that a row of results could reach, or None where no bound is known.

    Args:
        rows: from `read`.
        gpu_name: as the driver names it.
        row: with model, dtype, batch_size and engine; all but jax are held against eager's bound,
            and `jax-...`, with something switched off, has none.
    """
    if row["engine"].startswith("jax-"):
        return None
    for bound in rows:
        keys = ("model", "dtype", "batch_size")
        if bound["gpu_name"] == gpu_name and all(bound[key] == row.get(key) for key in keys):
            seconds = bound["bound_s" if row["engine"] == "jax" else "eager_bound_s"]
            return float(bound["batch_size"] / seconds)
    return None


def main() -> None:
    """Compile what is not in the folder, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpu", nargs="+", default=["h100"])
    parser.add_argument("--kept", action="store_true", help="only what is in the folder already")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    rows, versions = [], {}
    for gpu in asked.gpu:
        for dtype in _DTYPES:
            for key, model in MODELS.items():
                path = asked.folder / f"{model.name}-{gpu}-{dtype}.json"
                words = command(gpu, key, dtype)
                if not path.exists():
                    if asked.kept:
                        continue
                    full = [sys.executable, "-m", "accbench", *words]
                    done = subprocess.run(full, cwd=ROOT, stdout=subprocess.PIPE, check=True)
                    path.write_bytes(done.stdout)
                found = json.loads(path.read_text())
                versions = found["versions"]
                rows.append(_row(found, dtype, words))
    made = {"made_by": "python -m benchmarks.gpu_parts.bounds FOLDER", "versions": versions}
    FILE.write_text(json.dumps({**made, "rows": rows}, indent=1) + "\n")


def _row(found: dict[str, Any], dtype: str, words: list[str]) -> dict[str, Any]:
    step = found["step"]
    return {
        "command": f"accbench {' '.join(words)}",
        "gpu_name": found["gpu"]["name"], "model": found["task"]["model"], "dtype": dtype,
        "batch_size": found["task"]["batch_size"], "launches": step["launches"],
        "bytes": step["bytes"], "flops": step["flops"], "bound_s": step["bound_s"],
        "peak_bytes": found["memory"]["peak_bytes"],
        "eager_bound_s": found["eager"]["bound_s"],
    }  # fmt: skip


if __name__ == "__main__":
    main()
