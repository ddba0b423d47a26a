"""What other programs and the devices did while a run went on, observed from outside the run."""

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

_SAMPLE_EVERY_S = 0.5
# NVML's reasons for a low clock that are not normal for a busy device, as the power cap
# (SwPowerCap) is.
_THROTTLE_REASONS = ("HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown")


class DeviceWatch:
    """An observer of the machine, from its construction until `stop`.

    It belongs in the process that starts the run's workers and waits for them before `stop`.
    """

    def __init__(self, num_devices: int) -> None:
        self._started = time.perf_counter()
        self._busy_s, self._run_s = _busy_cpu_s(), _run_cpu_s()
        self._nvidia = NvmlSampler(num_devices) if num_devices else None

    def stop(self) -> DeviceRecord:
        """Stop and return what was observed."""
        wall_s = time.perf_counter() - self._started
        device_fields = self._nvidia.stop() if self._nvidia else {}
        share = None
        busy_s = _busy_cpu_s()
        if busy_s is not None and self._busy_s is not None:
            others_s = busy_s - self._busy_s - (_run_cpu_s() - self._run_s)
            share = max(0.0, others_s) / (wall_s * len(os.sched_getaffinity(0)))
        return DeviceRecord(wall_s=wall_s, other_cpu_share=share, **device_fields)


def _run_cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _busy_cpu_s() -> float | None:
    """Return the seconds since boot that the processors we may use were busy.

    proc(5) gives them, on Linux alone; None elsewhere.
    """
    path = Path("/proc/stat")
    if not path.exists():
        return None
    own_cpus = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    ticks = 0
    for line in path.read_text().splitlines():
        name, *columns = line.split()
        if name in own_cpus:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, columns[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


class DeviceSample(NamedTuple):
    """The state of the devices at one time; a field is None where a device does not tell it."""

    clock_mhz: float | None
    """The clock of the slowest device."""
    power_w: float | None
    """The power of all devices together."""
    throttled: bool | None
    """Whether any device is throttled."""


class NvmlSampler:
    """A thread that samples the first `num_devices` NVIDIA devices through NVML."""

    def __init__(self, num_devices: int) -> None:
        self._stopped = threading.Event()
        self._samples: list[DeviceSample] = []
        self._other_processes: int | None = None
        self._thread = threading.Thread(target=self._watch, args=(num_devices,), daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, Any]:
        """Stop and return fields of `DeviceRecord`; empty where NVML is not there."""
        self._stopped.set()
        self._thread.join()
        if not self._samples:
            return {}
        clocks = [sample.clock_mhz for sample in self._samples if sample.clock_mhz is not None]
        # The first half is start-up and compilation.
        late = self._samples[len(self._samples) // 2 :]
        powers = [sample.power_w for sample in late if sample.power_w is not None]
        throttled = [sample.throttled for sample in self._samples if sample.throttled is not None]
        return {
            "throttled_share": sum(throttled) / len(throttled) if throttled else None,
            "other_device_processes": self._other_processes,
            "sm_clock_mhz": statistics.median(clocks) if clocks else None,
            "power_w": statistics.median(powers) if powers else None,
        }

    def _watch(self, num_devices: int) -> None:
        with _nvml() as nvml:
            if nvml is None:
                return
            handles = _visible_handles(nvml)[:num_devices]
            if not handles:
                return
            processes = _query_each(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handles)
            self._other_processes = None if processes is None else sum(map(len, processes))
            while not self._stopped.wait(_SAMPLE_EVERY_S):
                self._samples.append(_sample(nvml, handles))


def _visible_handles(nvml: Any) -> list[Any]:
    """Return the devices that CUDA numbers from 0, which CUDA_VISIBLE_DEVICES may choose."""
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


def _sample(nvml: Any, handles: list[Any]) -> DeviceSample:
    mask = 0
    for reason in _THROTTLE_REASONS:
        mask |= getattr(nvml, f"nvmlClocksEventReason{reason}", 0) or getattr(
            nvml, f"nvmlClocksThrottleReason{reason}", 0
        )
    clocks = _query_each(nvml, nvml.nvmlDeviceGetClockInfo, handles, nvml.NVML_CLOCK_SM)
    powers_mw = _query_each(nvml, nvml.nvmlDeviceGetPowerUsage, handles)
    reasons = _query_each(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handles)
    return DeviceSample(
        clock_mhz=None if clocks is None else float(min(clocks)),
        power_w=None if powers_mw is None else sum(powers_mw) / 1000,
        throttled=None if reasons is None else any(active & mask for active in reasons),
    )


def _query_each(
    nvml: Any, query: Callable[..., Any], handles: list[Any], *arguments: Any
) -> list[Any] | None:
    """Return each device's answer; None where one cannot answer."""
    try:
        return [query(handle, *arguments) for handle in handles]
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
