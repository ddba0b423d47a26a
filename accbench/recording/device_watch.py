"""What other programs and the devices did while a run went on, seen from outside the run."""

import contextlib
import os
import resource
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from accbench.recording.records import DeviceRecord

_LOOK_EVERY_S = 0.5
# NVML's reasons for a clock below the wanted one that are no normal state of a busy
# device; the power cap (SwPowerCap) is one.
_THROTTLE_REASONS = ("HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown")


class Watch:
    """Looks from its making until `stop`.

    In the process that starts the run's workers, and waits for them before `stop`.
    """

    def __init__(self, num_devices: int) -> None:
        self._started = time.perf_counter()
        self._busy_s, self._own_s = _busy_cpu_s(), _own_cpu_s()
        self._nvidia = Nvidia(num_devices) if num_devices else None

    def stop(self) -> DeviceRecord:
        """What was seen."""
        wall_s = time.perf_counter() - self._started
        seen = self._nvidia.stop() if self._nvidia else {}
        share = None
        busy_s = _busy_cpu_s()
        if busy_s is not None and self._busy_s is not None:
            others_s = busy_s - self._busy_s - (_own_cpu_s() - self._own_s)
            share = max(0.0, others_s) / (wall_s * len(os.sched_getaffinity(0)))
        return DeviceRecord(wall_s=wall_s, other_cpu_share=share, **seen)


def _own_cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _busy_cpu_s() -> float | None:
    """Seconds that the processors we may use were busy, since boot; proc(5), Linux alone."""
    path = Path("/proc/stat")
    if not path.exists():
        return None
    ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = 0
    for line in path.read_text().splitlines():
        name, *columns = line.split()
        if name in ours:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, columns[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


class Look(NamedTuple):
    """What the devices said at a time; None where one does not tell."""

    clock_mhz: float | None
    """Of the slowest."""
    power_w: float | None
    """All together."""
    throttled: bool | None
    """Whether any is."""


class Nvidia:
    """Looks at the first `num_devices` NVIDIA devices through NVML in a thread."""

    def __init__(self, num_devices: int) -> None:
        self._stopped = threading.Event()
        self._looks: list[Look] = []
        self._others: int | None = None
        self._thread = threading.Thread(target=self._watch, args=(num_devices,), daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, Any]:
        """Fields of `DeviceRecord`; empty where NVML is not there."""
        self._stopped.set()
        self._thread.join()
        if not self._looks:
            return {}
        clocks = [look.clock_mhz for look in self._looks if look.clock_mhz is not None]
        # The first half is start-up and compilation.
        late = self._looks[len(self._looks) // 2 :]
        powers = [look.power_w for look in late if look.power_w is not None]
        throttled = [look.throttled for look in self._looks if look.throttled is not None]
        return {
            "throttled_share": sum(throttled) / len(throttled) if throttled else None,
            "other_device_processes": self._others,
            "sm_clock_mhz": statistics.median(clocks) if clocks else None,
            "power_w": statistics.median(powers) if powers else None,
        }

    def _watch(self, num_devices: int) -> None:
        with _nvml() as nvml:
            if nvml is None:
                return
            handles = _visible(nvml)[:num_devices]
            if not handles:
                return
            processes = _of_each(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handles)
            self._others = None if processes is None else sum(map(len, processes))
            while not self._stopped.wait(_LOOK_EVERY_S):
                self._looks.append(_look(nvml, handles))


def _visible(nvml: Any) -> list[Any]:
    """The devices that CUDA numbers from 0, which CUDA_VISIBLE_DEVICES may choose."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        names = [str(index) for index in range(nvml.nvmlDeviceGetCount())]
    else:
        names = [name.strip() for name in chosen.split(",") if name.strip()]
    return [
        nvml.nvmlDeviceGetHandleByIndex(int(name))
        if name.isdigit()
        else nvml.nvmlDeviceGetHandleByUUID(name)
        for name in names
    ]


def _look(nvml: Any, handles: list[Any]) -> Look:
    mask = 0
    for reason in _THROTTLE_REASONS:
        mask |= getattr(nvml, f"nvmlClocksEventReason{reason}", 0) or getattr(
            nvml, f"nvmlClocksThrottleReason{reason}", 0
        )
    clocks = _of_each(nvml, nvml.nvmlDeviceGetClockInfo, handles, nvml.NVML_CLOCK_SM)
    powers_mw = _of_each(nvml, nvml.nvmlDeviceGetPowerUsage, handles)
    reasons = _of_each(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handles)
    return Look(
        clock_mhz=None if clocks is None else float(min(clocks)),
        power_w=None if powers_mw is None else sum(powers_mw) / 1000,
        throttled=None if reasons is None else any(held & mask for held in reasons),
    )


def _of_each(
    nvml: Any, ask: Callable[..., Any], handles: list[Any], *arguments: Any
) -> list[Any] | None:
    """What each device answers; None where one cannot."""
    try:
        return [ask(handle, *arguments) for handle in handles]
    except nvml.NVMLError:
        return None


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver here
        yield None
        return
    try:
        with contextlib.suppress(pynvml.NVMLError):  # a device that is not there
            yield pynvml
    finally:
        pynvml.nvmlShutdown()
