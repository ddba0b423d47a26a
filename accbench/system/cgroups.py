"""The processors and the memory that a container or a scheduler's job may use."""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OF_PROCESS = Path("/proc/self/cgroup")
# Version 1 writes the largest number of whole pages for no limit.
_NO_LIMIT_BYTES = 2**60


def num_cores() -> int:
    """Return the cores that this process may use, by its affinity and its share of time.

    A share of two and a half cores counts as three.
    """
    if hasattr(os, "sched_getaffinity"):
        visible = len(os.sched_getaffinity(0))
    else:
        visible = os.cpu_count() or 1
    share = cpu_limit()
    return visible if share is None else max(1, min(visible, math.ceil(share)))


def cpu_limit() -> float | None:
    """Return the processor time allowed per second, in seconds; None without a limit."""
    limits = []
    for folder in _folders("cpu"):
        for line in (_read(folder / "cpu.max"), _of_version_1(folder)):
            quota, _, period = line.partition(" ")
            with contextlib.suppress(ValueError):  # "max", or no such file
                if int(quota) > 0 and int(period) > 0:
                    limits.append(int(quota) / int(period))
    return min(limits, default=None)


def _of_version_1(folder: Path) -> str:
    return f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"


def throttled_s() -> float | None:
    """Return the processor seconds for which this process's groups were held back so far.

    None where the kernel does not count them.
    """
    total_s, is_counted = 0.0, False
    for folder in _folders("cpu"):
        for line in _read(folder / "cpu.stat").splitlines():
            name, _, value = line.partition(" ")
            units = {"throttled_usec": 1e-6, "throttled_time": 1e-9}  # of version 2 and of 1
            if name in units:
                total_s, is_counted = total_s + int(value) * units[name], True
    return total_s if is_counted else None


def memory_limit_bytes() -> int | None:
    """Return the memory allowed in bytes; None without a limit."""
    limits = []
    for folder in _folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(ValueError):
                limits.append(int(_read(folder / name)))
    return min((limit for limit in limits if limit < _NO_LIMIT_BYTES), default=None)


def _folders(controller: str) -> Iterator[Path]:
    """Yield this process's groups, from its own up to the root, as the limits of all apply.

    /proc/self/cgroup has lines of the form `number:controllers:path`, see cgroups(7). In a
    container the path may be the host's, while the mounted root is the container's own group.
    """
    for line in _read(OF_PROCESS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = ROOT / controller if controllers else ROOT
        lowest = top / path.strip("/")
        for folder in (lowest, *lowest.parents):
            if folder.is_relative_to(top):
                yield folder


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
