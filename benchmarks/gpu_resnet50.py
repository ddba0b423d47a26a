"""Run the grid of gpu_resnet50.sh; write OUT/results.md and OUT/results.json.

DEVICE=cpu python benchmarks/gpu_resnet50.py OUT [--tiny]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from accbench.pjrt import gpu, nvidia  # noqa: E402
from accbench.recording import records  # noqa: E402
from accbench.report import summary  # noqa: E402
from benchmarks.smoke import add_tiny  # noqa: E402

DEVICE = os.environ.get("DEVICE", "cuda")
REHEARSAL = DEVICE == "cpu"
LIMIT_S = float(os.environ.get("LIMIT_S", 540))
PYTHON = os.environ.get("PYTHON", sys.executable)
XLA_PYTHON = os.environ.get("XLA_PYTHON", PYTHON)
LOSS_STEPS = 6 if REHEARSAL else 50
# Of one 224 px image, forward and backward: 4.09e9 multiply-adds, twice that in
# operations, three times forward. Bytes: the two limits on an H200 (4.8 TB/s) that the
# design names, 12,400 images/s with fused and 9,300 with separate element-wise operations.
FLOP_AN_IMAGE = 3 * 2 * 4.09e9
BYTES_AN_IMAGE = {"fused": 4.8e12 / 12_400, "separate": 4.8e12 / 9_300}
# name -> (engine, flags, interpreter)
VARIANTS = {
    "ddp channels_last": ("ddp", ["--ddp.channels_last"], PYTHON),
    "ddp NCHW": ("ddp", ["--ddp.no-channels_last"], PYTHON),
    "inductor": ("inductor", [], PYTHON),
    "xla traced": ("xla", ["--xla.replay=off"], XLA_PYTHON),
    "xla replayed": ("xla", ["--xla.replay=on"], XLA_PYTHON),
}


@dataclass(frozen=True)
class Run:
    """One cell of the grid."""

    variant: str
    amp_dtype: str
    batch_size: int
    losses: bool = False
    """Record the loss of each of the first steps, instead of a speed."""

    @property
    def name(self) -> str:
        kind = "losses" if self.losses else "speed"
        return f"{kind}-{self.variant.replace(' ', '-')}-{self.amp_dtype}-{self.batch_size}"


def grid() -> list[Run]:
    """What matters most comes first, for the time may run out."""
    middle, others = (2, (4,)) if REHEARSAL else (256, (1024, 64, 512, 128))
    runs = [Run(variant, "float16", middle) for variant in VARIANTS]
    runs += [Run(variant, "float16", middle, losses=True) for variant in VARIANTS]
    runs += [Run(variant, "bfloat16", middle) for variant in VARIANTS]
    for batch_size in others:
        for dtype in ("float16", "bfloat16"):
            runs += [
                Run(variant, dtype, batch_size) for variant in VARIANTS if variant != "ddp NCHW"
            ]
    return runs


def command(run: Run, out: Path) -> list[str]:
    """The training command of a run."""
    engine, flags, python = VARIANTS[run.variant]
    if run.losses:
        steps = [f"--max_steps={LOSS_STEPS}", "--warmup_steps=1", "--log_interval=1"]
    else:
        last, window = (8, 2) if REHEARSAL else (60, 20)
        steps = [f"--max_steps={last}", "--warmup_steps=4", f"--log_interval={window}"]
    model = "accbench.machine.self_test:net" if REHEARSAL else "resnet50"
    return [
        python, "launch_single_task.py", f"--engine={engine}", f"--device={DEVICE}", *flags,
        f"--model={model}", f"--image_size={32 if REHEARSAL else 224}", "--data=synthetic",
        f"--amp_dtype={run.amp_dtype}", f"--batch_size={run.batch_size}", "--lr=1e-4", *steps,
        "--eval_interval=0", "--save_interval=0", "--workers=0", f"--output_dir={out / run.name}",
    ]  # fmt: skip


class Bounds:
    """What the step is bound by on this GPU, as `accbench preflight` has it: compiled beside the
    first runs, on the host, for the middle batch; an image's share hardly depends on the batch."""

    def __init__(self, out: Path) -> None:
        shown = nvidia.driver().gpus
        known = {gpu.load(name).name: name for name in gpu.names()}
        target = "h100" if REHEARSAL else known.get(shown[0].name) if shown else None
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.found: dict[str, dict[str, float]] = {}
        if target is None:
            print(f"no bound: {[one.name for one in shown]} is described in no file of preflight's")
            return
        self.out = out
        for dtype in ("float16", "bfloat16"):
            asked = Run("xla traced", dtype, grid()[0].batch_size)
            kept = ("--model", "--image_size", "--data", "--amp_dtype", "--batch_size")
            flags = [word for word in command(asked, out) if word.startswith(kept)]
            with (out / f"preflight-{dtype}.json").open("wb") as file:
                self.processes[dtype] = subprocess.Popen(
                    ["nice", XLA_PYTHON, "-m", "accbench", "preflight", f"--gpu={target}",
                     "--format=json", *flags],
                    cwd=ROOT, stdout=file, env={**os.environ, "PYTHONPATH": str(ROOT)},
                )  # fmt: skip

    def images_per_s(self, row: dict[str, Any]) -> float | None:
        """At most, for this row; None where it is not known, or not yet."""
        dtype = row["dtype"]
        process = self.processes.get(dtype)
        if dtype not in self.found and process is not None and process.poll() == 0:
            told = json.loads((self.out / f"preflight-{dtype}.json").read_text())
            self.found[dtype] = {
                kind: (told[kind] or {}).get("samples_per_s_at_most") for kind in ("step", "eager")
            }
        if row["variant"] not in ("xla traced", "xla replayed", "ddp channels_last"):
            return None
        kind = "step" if row["variant"].startswith("xla") else "eager"
        return self.found.get(dtype, {}).get(kind)

    def close(self) -> None:
        """End what has not ended."""
        for process in self.processes.values():
            process.kill()
            process.wait()


def measure(run: Run, out: Path, timeout_s: float) -> dict[str, Any]:
    """Train; the run's numbers, or why there are none."""
    row: dict[str, Any] = {"variant": run.variant, "dtype": run.amp_dtype,
                           "batch": run.batch_size, "losses": run.losses}  # fmt: skip
    try:
        done = subprocess.run(
            command(run, out), cwd=ROOT, capture_output=True, text=True, timeout=timeout_s,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {**row, "error": "no time left"}
    if done.returncode != 0:
        return {**row, "error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    found = records.read(out / run.name / "records.jsonl")
    windows = [record for record in found if isinstance(record, records.WindowRecord)]
    if run.losses:
        return {**row, "loss_by_step": [window.loss for window in windows]}
    told = summary.summarize_records(run.name, found)
    steady = [window for window in windows if not window.warmup]
    num_steps = sum(window.num_steps for window in steady)
    host_ms = 1e3 * sum(window.dispatch_s for window in steady) / num_steps
    speed = told.samples_per_s or 0.0
    return {
        **row,
        "images_per_s": speed,
        "tflop_per_s": speed * FLOP_AN_IMAGE / 1e12,
        "gb_per_s": {name: speed * size / 1e9 for name, size in BYTES_AN_IMAGE.items()},
        "step_ms": told.step_ms,
        "host_ms": host_ms,
        "compile_s": told.compile_s,
        "first_step_s": told.time_to_first_step_s,
        "peak_mib": (told.peak_memory_bytes or 0) / 2**20,
    }


def render(rows: list[dict[str, Any]], bounds: Bounds) -> str:
    """The tables, as Markdown."""
    lines = [
        "| variant | type | batch | images/s | at most, by preflight | TFLOP/s | GB/s, fused "
        "| GB/s, separate | step ms | host ms | compile s | first step s | peak MiB |",
        "| --- | --- " + "| ---: " * 11 + "|",
    ]
    for row in rows:
        start = f"| {row['variant']} | {row['dtype']} | {row['batch']} "
        if row["losses"]:
            continue
        if "error" in row:
            lines.append(f"{start}| {row['error'].replace('|', '/')} " + "| " * 9 + "|")
            continue
        most = bounds.images_per_s(row)
        cells = [
            f"{row['images_per_s']:,.0f}", f"{most:,.0f}" if most else "-",
            f"{row['tflop_per_s']:.1f}",
            f"{row['gb_per_s']['fused']:,.0f}", f"{row['gb_per_s']['separate']:,.0f}",
            f"{row['step_ms']:.1f}", f"{row['host_ms']:.1f}", f"{row['compile_s']:.1f}",
            f"{row['first_step_s']:.1f}", f"{row['peak_mib']:,.0f}",
        ]  # fmt: skip
        lines.append(f"{start}| " + " | ".join(cells) + " |")
    lines += [
        "",
        "GB/s are images/s times the bytes of the design's two limits. Host ms: tracing or "
        "dispatch a step; what is left of the step, the host waited.",
        "", "Losses:", "",
    ]  # fmt: skip
    told = [row for row in rows if row["losses"]]
    for row in told:
        values = row.get("loss_by_step") or [row.get("error")]
        shown = values[:3] + values[9::10] if len(values) > 12 else values
        text = ", ".join(f"{v:.5f}" if isinstance(v, float) else str(v) for v in shown)
        lines.append(f"- {row['variant']}: {text}")
    by_variant = {row["variant"]: row.get("loss_by_step") for row in told}
    traced, replayed = by_variant.get("xla traced"), by_variant.get("xla replayed")
    if traced and replayed:
        lines += ["", f"Traced and replayed the same in all {len(traced)} steps: "
                  f"{traced == replayed}"]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure until done or out of time; what there is, is written after every run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    add_tiny(parser)
    asked = parser.parse_args()
    out = asked.out.absolute()
    out.mkdir(parents=True)
    ends, rows = time.monotonic() + LIMIT_S, []
    runs = grid()
    if asked.tiny:  # a speed and a run of losses, of one variant
        runs = [run for run in runs if run.variant == runs[0].variant][:2]
    bounds = Bounds(out)
    for run in runs:
        left_s = ends - time.monotonic()
        if left_s < 5:
            break
        rows.append(measure(run, out, left_s))
        print(json.dumps(rows[-1]), flush=True)
        (out / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
        (out / "results.md").write_text(render(rows, bounds))
    print(render(rows, bounds))
    bounds.close()
    print(f"{len(rows)} of {len(runs)} runs in {LIMIT_S - (ends - time.monotonic()):.0f} s: {out}")


if __name__ == "__main__":
    main()
