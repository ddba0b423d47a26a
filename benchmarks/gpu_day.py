"""One GPU for a quarter of an hour: what accbench does there, what matters most first.

    python benchmarks/gpu_day.py OUT                     on a machine with an NVIDIA GPU
    python benchmarks/gpu_day.py OUT --device cpu --tiny a rehearsal

Doctor and self-tests; the GPU's ceilings; ResNet-50, GPT-2 small and ViT-B/16 by ddp, inductor and
jax, in both 16-bit types, beside preflight's bounds; loops of plain torch; the kernels of jax's
step beside their bounds and beside eager's; a comparison with numerics; JPEG files. Each item is a
process group with a time of its own. After each, OUT/results.md, OUT/results.jsonl and OUT/log.txt
are written anew. A failed item is a row with the last 30 lines of its standard error. What is done
stays in --state: a second call with the same folder goes on. docs/cuda.md has the calls.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_parts import items as parts  # noqa: E402
from benchmarks.gpu_parts import page  # noqa: E402
from benchmarks.smoke import add_tiny  # noqa: E402

_LEAST_S = 20.0
_CPU_FACTOR = 6
_GRACE_S = 5.0
_KEPT_LINES = 30
_LOGGED_CHARACTERS = 20_000


def run_item(item: parts.Item, folder: Path, limit_s: float) -> dict[str, Any]:
    """Run an item to its end or its limit; returns its row, which has `error` if it failed.

    Args:
        item: what to run.
        folder: the item's own, emptied unless it goes on there.
        limit_s: seconds after which its process group is killed.
    """
    if not item.continues:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, **item.env, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    started = time.monotonic()
    with (folder / "out.txt").open("w") as out, (folder / "err.txt").open("w") as err:
        process = subprocess.Popen(
            item.command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            start_new_session=True,
        )  # fmt: skip
        try:
            error = _wait(process, limit_s, item.statuses)
        finally:
            _end_group(process)
    row = {"name": item.name, **item.facts, "wall_s": time.monotonic() - started}
    if error is None:
        try:
            row |= item.collect(folder, (folder / "out.txt").read_text(errors="replace"))
        except Exception as caught:  # the page must have the other rows
            error = f"nothing to read: {type(caught).__name__}: {' '.join(str(caught).split())}"
    if error is not None:
        row |= {"error": error[:300], "stderr": _last_lines(folder)}
    return row


def _wait(
    process: "subprocess.Popen[bytes]", limit_s: float, statuses: tuple[int, ...]
) -> str | None:
    try:
        status = process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"not done in {limit_s:.0f} s"
    return None if status in statuses else f"exit status {status}"


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """End what is left of an item, children of children too."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, kind)
        if process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_GRACE_S)


def _last_lines(folder: Path) -> list[str]:
    lines = [*(folder / "err.txt").read_text(errors="replace").splitlines()]
    lines = lines or (folder / "out.txt").read_text(errors="replace").splitlines()
    return lines[-_KEPT_LINES:]


Render = Callable[[list[dict[str, Any]]], str]


def write(out: Path, state: Path, rows: list[dict[str, Any]], render: Render) -> None:
    """Write all that is known."""
    (out / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (out / "results.md").write_text(render(rows))
    with (out / "log.txt").open("w") as log:
        for row in rows:
            for kind in ("out", "err"):
                path = state / row["name"] / f"{kind}.txt"
                text = path.read_text(errors="replace") if path.exists() else ""
                log.write(f"==== {row['name']} {kind}\n{text[-_LOGGED_CHARACTERS:]}\n")


def run_all(
    items: list[parts.Item],
    state: Path,
    out: Path,
    limit_s: float,
    redo: bool = False,
    render: Render = page.render,
) -> list[dict[str, Any]]:
    """Run the items in order until the time is over; what an earlier call has done is kept."""
    out.mkdir(parents=True, exist_ok=True)
    ends, rows = time.monotonic() + limit_s, []
    for item in items:
        kept = state / item.name / "row.json"
        earlier = json.loads(kept.read_text()) if kept.exists() else None
        if earlier is not None and "error" not in earlier and not redo:
            rows.append(earlier)
            continue
        left_s = ends - time.monotonic()
        if left_s < min(_LEAST_S, item.limit_s):
            print(f"{item.name}: no time left")
            continue
        row = run_item(item, state / item.name, min(item.limit_s, left_s))
        kept.write_text(json.dumps(row))
        rows.append(row)
        speed = f", {row['samples_per_s']:,.1f} samples/s" if row.get("samples_per_s") else ""
        print(f"{item.name}: {row.get('error', 'ok')}, {row['wall_s']:.0f} s{speed}", flush=True)
        write(out, state, rows, render)
    write(out, state, rows, render)
    return rows


def end_item_on_sigterm() -> None:
    """Have SIGTERM end this process by an exception, so that the item under way ends with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def main() -> None:
    """Run the day, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="receives results.md, results.jsonl and log.txt")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--items", default="", help="names or their beginnings, comma-separated")
    parser.add_argument("--limit_s", type=float, default=float(os.environ.get("LIMIT_S", 480)),
                        help="seconds for all; LIMIT_S is the same")  # fmt: skip
    parser.add_argument("--state", type=Path, help="folder that a second call goes on from",
                        default=Path(tempfile.gettempdir()) / "accbench-gpu-day")  # fmt: skip
    parser.add_argument("--redo", action="store_true", help="do again what is done")
    add_tiny(parser)
    asked = parser.parse_args()
    end_item_on_sigterm()
    day = parts.Day(asked.state.absolute(), asked.device, asked.tiny)
    chosen = parts.choose(parts.all_items(day), asked.items)
    if asked.device == "cpu":  # the limits are a GPU's machine's
        chosen = [replace(item, limit_s=_CPU_FACTOR * item.limit_s) for item in chosen]
    out = asked.out.absolute()
    rows = run_all(chosen, day.state, out, asked.limit_s, asked.redo)
    table, _, details = (out / "results.md").read_text().partition("\n## ")
    print(f"{details[:5000]}\n\n{table}")  # of a long output the end is what people see
    failed = [row["name"] for row in rows if "error" in row]
    print(f"{len(rows)} of {len(chosen)} items done, failed: {', '.join(failed) or 'none'}")


if __name__ == "__main__":
    main()
