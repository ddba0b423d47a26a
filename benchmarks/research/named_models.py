"""Ten steps of named models by one engine, beside eager's: verdicts and losses.

    python benchmarks/research/named_models.py FOLDER [--engine jax] [--models NAME,...]
        [--workers 1,2] [--dtypes float32,bfloat16] [--judge_only]

Each in both types, with one worker and with two, through the numerics pass that `accbench
compare` runs: every step from float64's state, then a free run from the start. Prints a table as
Markdown. A folder that was begun is gone on with.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from accbench.report import run as runs  # noqa: E402
from benchmarks import numerics_passes, planted  # noqa: E402
from benchmarks.numerics_settings import NAMED, named  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engine", default="jax")
    parser.add_argument("--models", default=",".join(NAMED))
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--judge_only", action="store_true")
    flags = parser.parse_args()
    base = flags.folder.absolute()
    settings = [
        (model, dtype, int(num))
        for num in flags.workers.split(",")
        for model in flags.models.split(",")
        for dtype in flags.dtypes.split(",")
    ]
    if not flags.judge_only:
        with tempfile.TemporaryDirectory() as folder:
            plugins = planted.install(Path(folder))
            for setting in settings:
                numerics_passes.start_setting(base, named(*setting), [0], [flags.engine], plugins)
    print("| model | dtype | workers | verdict | first loss | tenth | furthest of ten from ddp's |")
    print("| --- | --- | ---: | --- | ---: | ---: | ---: |")
    reasons = []
    for model, dtype, num in settings:
        name = named(model, dtype, num)
        found = numerics_passes.judge(base, name, 0, flags.engine)
        own, eager = (free_losses(base, name, engine) for engine in (flags.engine, "ddp"))
        away = max((abs(a - b) / abs(b) for a, b in zip(own, eager, strict=False)), default=None)
        first, last = (f"{own[0]:.4f}", f"{own[-1]:.4f}") if own else ("", "")
        told = "" if away is None else f"{away:.1e}"
        print(f"| {model} | {dtype} | {num} | {found.verdict} | {first} | {last} | {told} |")
        reasons.append(f"{name}: {found.reason} (worst {found.worst})")
    print()
    print("\n".join(reasons))


def free_losses(base: Path, name: str, engine: str) -> list[float]:
    """Of the steps that an engine took on its own, from the start."""
    found = runs.read_if_there(numerics_passes.folder_of(base, name, 0, engine)).numerics
    return [r.loss for r in found if r.phase == "free" and r.loss is not None]


if __name__ == "__main__":
    main()
