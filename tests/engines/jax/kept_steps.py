"""Starts of engine jax that share a folder of kept steps, in one process.

    python -m tests.engines.jax.kept_steps FOLDER

Each start is an engine of its own, and finds what those before left on disk. Prints one line of
JSON: start -> its losses, and the files of the steps that are kept then.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tests.engines.jax.steps import Training

NUM_STEPS = 2


def start(folder: Path, *flags: str) -> dict[str, Any]:
    training = Training(
        "jax", "tests.nets:tiny", "--amp_level=O0", f"--jax.cache_dir={folder}", *flags
    )
    losses = training.steps(0, NUM_STEPS).losses
    return {"losses": losses, "kept": sorted(map(str, folder.rglob("*.jaxexport")))}


def main() -> None:
    folder = Path(sys.argv[1])
    found = {"first": start(folder)}
    (first,) = map(Path, found["first"]["kept"])
    content = first.read_bytes()
    found["smoothed"] = start(folder, "--label_smoothing=0.5")
    (smoothed,) = {*map(Path, found["smoothed"]["kept"])} - {first}
    first.write_bytes(smoothed.read_bytes())
    found["exchanged"] = start(folder)
    first.write_bytes(content[:-100] + bytes(100))
    found["damaged"] = start(folder)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
