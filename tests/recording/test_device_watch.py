"""What is seen of NVIDIA devices. NVML is made up here: the real one needs a driver."""

import sys
import types

import pytest

from accbench.recording import device_watch
from tests.conftest import wait_until

SLOWED_BY_HEAT = 0x20


class NVMLError(Exception):
    """As pynvml's."""


def made_up_nvml(reasons: dict[str, int]) -> types.ModuleType:
    """Two devices, `GPU-0` and `GPU-1`, that say the same but for what holds their clocks."""
    nvml = types.ModuleType("pynvml")
    nvml.__dict__.update(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        nvmlClocksEventReasonSwThermalSlowdown=SLOWED_BY_HEAT,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: f"GPU-{index}",
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [],
        nvmlDeviceGetClockInfo=lambda handle, kind: 1700 + int(handle[-1]),
        nvmlDeviceGetPowerUsage=lambda handle: 300_000,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: reasons.get(handle, 0),
    )
    return nvml


def watched(monkeypatch: pytest.MonkeyPatch, nvml: types.ModuleType, num_devices: int):
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(device_watch, "_SAMPLE_EVERY_S", 0.01)
    watch = device_watch.DeviceWatch(num_devices)
    seen = watch._nvidia
    wait_until(lambda: len(seen._samples) > 3 or not seen._thread.is_alive())
    return watch.stop()


def test_clocks_power_and_heat_of_all_devices(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    seen = watched(monkeypatch, made_up_nvml({"GPU-1": SLOWED_BY_HEAT}), 2)
    assert (seen.sm_clock_mhz, seen.power_w) == (1700, 600)
    assert seen.throttled_share == 1
    assert seen.other_device_processes == 0


def test_the_power_cap_is_no_throttling(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert watched(monkeypatch, made_up_nvml({"GPU-0": 0x4}), 2).throttled_share == 0


@pytest.mark.parametrize("chosen", ["1", "GPU-1,GPU-0", "1,0"])
def test_only_the_devices_that_the_run_gets(monkeypatch, chosen):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    seen = watched(monkeypatch, made_up_nvml({"GPU-0": SLOWED_BY_HEAT}), 1)
    assert (seen.sm_clock_mhz, seen.power_w, seen.throttled_share) == (1701, 300, 0)


def test_a_device_that_tells_no_power_tells_the_rest(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def unsupported(handle: str) -> int:
        raise NVMLError("not supported")

    nvml = made_up_nvml({})
    nvml.nvmlDeviceGetPowerUsage = unsupported
    seen = watched(monkeypatch, nvml, 1)
    assert (seen.power_w, seen.sm_clock_mhz) == (None, 1700)


def test_no_driver_is_no_device(monkeypatch):
    nvml = made_up_nvml({})

    def no_driver() -> None:
        raise NVMLError("driver not loaded")

    nvml.nvmlInit = no_driver
    assert watched(monkeypatch, nvml, 1).sm_clock_mhz is None
