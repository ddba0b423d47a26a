"""What took this machine's processors from a run, in each window.

Each worker reads the kernel's counters at the end of a window: the time that the processors were
busy, and the time that it and the processes below it used. Workers that may use the same
processors are summed up, and what is left was used by others.
"""

import hashlib
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from accbench.system import cgroups

PROC = Path("/proc")
PROCESSORS = Path("/sys/devices/system/cpu")
# The kernel counts in ticks of 10 ms, so that shorter stretches tell little.
_SAMPLE_EVERY_S = 0.5
# Reading each of a hundred processors takes milliseconds.
_MOST_HEAT_FILES = 8


class MachineUse(NamedTuple):
    """Where the processors' time went besides the run; a share is None where it is not known."""

    other_cpu_share: float | None = None
    stolen_cpu_share: float | None = None
    throttled_cpu_share: float | None = None
    swapped_in_bytes: int | None = None
    sampled_s: float | None = None


class Counters(NamedTuple):
    """Readings that only grow; NaN where this machine does not tell."""

    at_s: float
    run_cpu_s: float
    """Processor time of this process and of the processes below it."""
    busy_cpu_s: float
    """Processor time of all programs and of the kernel, on the processors we may use."""
    stolen_cpu_s: float
    """Processor time that the hypervisor gave to others."""
    throttled_cpu_s: float
    """Processor time held back by heat or by the container's share."""
    swapped_in_bytes: float


class MachineWatch:
    """Counters of one worker, read at the ends of windows.

    `sample` returns numbers for a collective, and `summarize` turns those of all ranks into a
    `MachineUse`. Windows shorter than half a second are not sampled one by one.
    """

    def __init__(self) -> None:
        self._processors = _processors()
        self._key = _key_of(self._processors)
        self._heat_files = _heat_files(self._processors)
        self._has_limit = cgroups.cpu_limit() is not None
        self._before = self._read()
        self._last_close_s = self._before.at_s
        self._is_due = True

    def sample(self) -> list[float]:
        """Return this rank's readings since the last sample; NaN where none is due."""
        now_s = time.perf_counter()
        window_s, self._last_close_s = now_s - self._last_close_s, now_s
        since_s = now_s - self._before.at_s
        differences = [math.nan] * len(Counters._fields)
        if self._is_due:
            after = self._read()
            differences = [b - a for a, b in zip(self._before, after, strict=True)]
            self._before, since_s = after, 0.0
        return [window_s, since_s, self._key, float(len(self._processors)), *differences]

    def summarize(self, by_rank: Sequence[Sequence[float]]) -> MachineUse:
        """Return what the samples of all ranks say, of the machine that was used most by others.

        All ranks decide alike, by rank 0's clock, whether the next window is sampled.
        """
        was_due = self._is_due
        window_s, since_s = by_rank[0][:2]
        self._is_due = since_s + window_s >= _SAMPLE_EVERY_S
        return machine_use([values[2:] for values in by_rank]) if was_due else MachineUse()

    def pause(self) -> None:
        """Leave out of the samples what happens until `resume`."""
        self._paused = self._read()

    def resume(self) -> None:
        """Go on as if nothing had happened since `pause`."""
        now = self._read()
        grown = [after - before for before, after in zip(self._paused, now, strict=True)]
        self._before = Counters(*(b + g for b, g in zip(self._before, grown, strict=True)))
        self._last_close_s += now.at_s - self._paused.at_s

    def _read(self) -> Counters:
        busy_s, stolen_s = _busy_and_stolen_s(self._processors)
        throttled_s = _heat_s(self._heat_files) * len(self._processors)
        if self._has_limit:
            throttled_s += cgroups.throttled_s() or 0.0
        return Counters(
            time.perf_counter(), _run_cpu_s(), busy_s, stolen_s, throttled_s, _swapped_in_bytes()
        )


def machine_use(by_rank: Sequence[Sequence[float]]) -> MachineUse:
    """Sum up ranks that share processors, and return the largest of each number.

    Args:
        by_rank: of each rank, a key of its processors, how many these are, and the differences of
            two `Counters`.
    """
    uses = []
    for key in dict.fromkeys(values[0] for values in by_rank):
        group = [values[1:] for values in by_rank if values[0] == key]
        num_processors = group[0][0]
        counted = [Counters(*values[1:]) for values in group]
        wall_s = max(counters.at_s for counters in counted)
        available_s = wall_s * num_processors
        others_s = max(c.busy_cpu_s for c in counted) - sum(c.run_cpu_s for c in counted)
        uses.append((
            others_s / available_s,
            max(c.stolen_cpu_s for c in counted) / available_s,
            max(c.throttled_cpu_s for c in counted) / available_s,
            max(c.swapped_in_bytes for c in counted),
            wall_s,
        ))  # fmt: skip
    columns = [[u for u in column if math.isfinite(u)] for column in zip(*uses, strict=True)]
    *largest, swapped, sampled_s = (max(column, default=None) for column in columns)
    others, stolen, throttled = (
        None if share is None else round(min(1.0, max(0.0, share)), 4) for share in largest
    )
    return MachineUse(
        others, stolen, throttled, None if swapped is None else int(swapped),
        None if sampled_s is None else round(sampled_s, 4),
    )  # fmt: skip


def _processors() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _key_of(processors: frozenset[int]) -> float:
    """Return a number that workers have in common if they may use the same processors."""
    boot = _text(PROC / "sys/kernel/random/boot_id") or os.uname().nodename
    digest = hashlib.blake2b(f"{boot} {sorted(processors)}".encode(), digest_size=6).digest()
    return float(int.from_bytes(digest, "big"))  # 48 bits: a float holds them


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _busy_and_stolen_s(processors: frozenset[int]) -> tuple[float, float]:
    """Return two columns of /proc/stat, see proc(5).

    Interrupts are left out: the network's are the run's own traffic.
    """
    ours = {f"cpu{number}" for number in processors}
    found, busy, stolen = 0, 0, 0
    for line in _text(PROC / "stat").splitlines():
        name, *columns = line.split(maxsplit=9)
        if not name.startswith("cpu"):
            break
        if name in ours and len(columns) > 7:
            user, nice, system, *_ = map(int, columns[:3])
            busy, stolen, found = busy + user + nice + system, stolen + int(columns[7]), found + 1
    if not found:
        return math.nan, math.nan
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    return busy * tick_s, stolen * tick_s


def _run_cpu_s() -> float:
    """Return the processor time of this process and of those below it, living or ended."""
    total_s = time.process_time()
    usage = os.times()
    total_s += usage.children_user + usage.children_system
    pending = _children(os.getpid())
    while pending:
        pid = pending.pop()
        total_s += _cpu_s_of(pid)
        pending += _children(pid)
    return total_s


def _children(pid: int) -> list[int]:
    try:
        threads = os.listdir(PROC / str(pid) / "task")
    except OSError:  # it has ended
        return []
    lines = (_text(PROC / str(pid) / "task" / thread / "children") for thread in threads)
    return [int(child) for line in lines for child in line.split()]


def _cpu_s_of(pid: int) -> float:
    """Return the processor time of a process and of its children that have ended."""
    # The name stands in parentheses and may hold blanks.
    fields = _text(PROC / str(pid) / "stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _heat_files(processors: frozenset[int]) -> list[Path]:
    ordered = sorted(processors)
    chosen = ordered[:: max(1, math.ceil(len(ordered) / _MOST_HEAT_FILES))]
    folders = [PROCESSORS / f"cpu{number}" / "thermal_throttle" for number in chosen]
    files = [folder / "core_throttle_total_time_ms" for folder in folders]
    return [file for file in files if file.exists()]


def _heat_s(files: Sequence[Path]) -> float:
    """Return the mean seconds for which heat has held these processors down."""
    if not files:
        return 0.0
    return sum(float(_text(file) or 0) for file in files) / 1000 / len(files)


def _swapped_in_bytes() -> float:
    """Return the bytes that have come back from swap space, by /proc/vmstat."""
    for line in _text(PROC / "vmstat").splitlines():
        if line.startswith("pswpin "):
            return float(line.split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return math.nan
