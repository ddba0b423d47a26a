"""Which kernels of a profiled step take how many times their bound.

A run with `--profile` leaves traces, and XLA its optimised program (`--xla_dump_to`). Preflight's
list of kernels, made of that very program, says what each moves and computes; the GPU's data sheet
makes a bound of it. Eager PyTorch's kernels have no such list, and stand beside it by their times.
"""

import dataclasses
import gzip
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from accbench.pjrt.gpu import GpuSpec
from accbench.preflight import hlo, kernels, summary

_LISTED = 40
_NOT_IN_PROGRAM = "not in the program"
# What a trace of JAX's holds beside the kernels: whole launches and steps.
_WHOLE = re.compile(r"jit_|ThunkExecutor|command_buffer|MemcpyH2D|end:|wait:")


@dataclasses.dataclass(frozen=True)
class Timed:
    """What was launched under one name, a step."""

    name: str
    ms: float
    launches: float


def of_jax(folder: Path, num_steps: int) -> list[Timed]:
    """Return the kernels of XLA's own trace, by the operation that each belongs to.

    Args:
        folder: a run's folder `profile`.
        num_steps: how many steps were traced.
    """
    from jax.profiler import ProfileData

    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for path in sorted(folder.rglob("*.xplane.pb")):
        data = ProfileData.from_file(str(path))
        planes = [plane for plane in data.planes if "/device:GPU" in (plane.name or "")]
        for plane in planes or [p for p in data.planes if p.name == "/host:CPU"]:
            for line in plane.lines:
                if planes and not str(line.name).startswith("Stream"):
                    continue  # sums of what the streams have
                for event in line.events:
                    name = _operation(event, has_gpu=bool(planes))
                    if name is not None:
                        sums[name][0] += event.duration_ns / 1e6
                        sums[name][1] += 1
    return _by_time(sums, num_steps)


def _operation(event: Any, has_gpu: bool) -> str | None:
    name = dict(event.stats).get("hlo_op")
    if name is None and not has_gpu:
        return None  # of the host's, other than XLA's
    name = str(event.name if name is None else name)
    return None if _WHOLE.match(name) else name


def of_torch(folder: Path, num_steps: int) -> list[Timed]:
    """Return the kernels of torch's trace; where there is no GPU, its operations."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for path in sorted(folder.glob("rank*.json.gz")):
        with gzip.open(path, "rt") as file:
            events = [e for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
        on_gpu = ("kernel", "gpu_memcpy", "gpu_memset")
        chosen = [e for e in events if e.get("cat") in on_gpu]
        for event in chosen or [e for e in events if e.get("cat") == "cpu_op"]:
            sums[event["name"]][0] += event["dur"] / 1e3
            sums[event["name"]][1] += 1
    return _by_time(sums, num_steps)


def _by_time(sums: dict[str, list[float]], num_steps: int) -> list[Timed]:
    timed = [Timed(name, ms / num_steps, count / num_steps) for name, (ms, count) in sums.items()]
    return sorted(timed, key=lambda one: -one.ms)


def program_of(dump: Path) -> str | None:
    """Return the text of the largest optimised program in XLA's dump, which is the step's."""
    paths = [*dump.glob("*_after_optimizations.txt")]
    return max(paths, key=lambda path: path.stat().st_size).read_text() if paths else None


def against_bounds(timed: list[Timed], program: str, gpu: GpuSpec) -> list[dict[str, Any]]:
    """Match a step's kernels with preflight's list of them.

    Returns:
        A row a kernel, the one that loses the most time against its bound first: name, kind,
        source, ms, launches, bound_ms, and times (its bound), None where that is 0 or unknown.
    """
    known = {}
    for kernel in kernels.list_kernels(hlo.parse(program)):
        if kernel.kind != kernels.DONE:
            known[_spelled(kernel.name)] = kernel
    rows = []
    for one in timed:
        kernel = known.get(_spelled(one.name))
        bound_ms = 1e3 * summary.bound_s(kernel, gpu) if kernel else 0.0
        rows.append({
            "name": one.name, "kind": kernel.kind if kernel else _NOT_IN_PROGRAM,
            "source": kernel.source if kernel else "", "ms": one.ms, "launches": one.launches,
            "bound_ms": bound_ms, "times": one.ms / bound_ms if bound_ms else None,
        })  # fmt: skip
    return sorted(rows, key=lambda row: row["bound_ms"] - row["ms"])


def _spelled(name: str) -> str:
    """Return an instruction's name as a kernel has it."""
    return re.sub(r"[.\-]", "_", name)


def by_kind(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sum rows of `against_bounds` by kind."""
    sums: dict[str, dict[str, Any]] = {}
    for row in rows:
        start = {"name": row["kind"], "ms": 0.0, "launches": 0.0, "bound_ms": 0.0}
        total = sums.setdefault(row["kind"], start)
        for key in ("ms", "launches", "bound_ms"):
            total[key] += row[key]
    for total in sums.values():
        total["times"] = total["ms"] / total["bound_ms"] if total["bound_ms"] else None
    return sorted(sums.values(), key=lambda total: -total["ms"])


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return lines of a table of rows with their bounds, the first ones alone."""
    lines = [
        f"{'ms a step':>10} {'launches':>8} {'bound ms':>9} {'times':>6}  kernel, kind, source"
    ]
    for row in rows[:_LISTED]:
        times = "-" if row["times"] is None else f"{row['times']:.1f}"
        words = ", ".join(filter(None, (row["name"], row.get("kind"), row.get("source"))))
        lines.append(
            f"{row['ms']:10.3f} {row['launches']:8.1f} {row['bound_ms']:9.3f} {times:>6}  "
            f"{words[:130]}"
        )
    return lines


def plain_table(timed: list[Timed]) -> list[str]:
    """Return lines of a table of kernels without bounds, the first ones alone."""
    lines = [f"{'ms a step':>10} {'launches':>8}  kernel"]
    return lines + [f"{t.ms:10.3f} {t.launches:8.1f}  {t.name[:150]}" for t in timed[:_LISTED]]


def total(timed: list[Timed]) -> str:
    """Return a line with the sums of a step."""
    ms, launches = sum(one.ms for one in timed), sum(one.launches for one in timed)
    return f"{ms:.2f} ms of kernels a step, {launches:.0f} launches"
