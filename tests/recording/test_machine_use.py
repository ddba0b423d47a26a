"""What others take of the machine, as a worker sees it."""

import math
import subprocess
import sys
import time

import pytest

from accbench.recording import machine_use
from accbench.recording.machine_use import Counters, MachineUse
from accbench.system import cgroups

BUSY = "import time; end = time.time() + 600\nwhile time.time() < end: pass"


def seen(run_s: float, busy_s: float = 10.0, key: float = 1.0, **others: float) -> list[float]:
    """A rank's share in five seconds of two processors."""
    none = dict(stolen_cpu_s=0.0, throttled_cpu_s=0.0, swapped_in_bytes=0.0)
    return [key, 2.0, *Counters(5.0, run_s, busy_s, **{**none, **others})]


def test_ranks_of_one_machine_are_one_run_and_the_busiest_machine_counts():
    assert machine_use.machine_use([seen(4.0), seen(2.0)]) == MachineUse(0.4, 0.0, 0.0, 0, 5.0)
    quiet, shared = seen(9.0, busy_s=9.1), seen(6.0, key=2.0, stolen_cpu_s=1.0)
    assert machine_use.machine_use([quiet, shared]) == MachineUse(0.4, 0.1, 0.0, 0, 5.0)
    # Ticks of 10 ms are coarser than the run's own clock.
    assert machine_use.machine_use([seen(9.5, busy_s=9.4)]).other_cpu_share == 0.0
    unknown = [seen(1.0, math.nan, stolen_cpu_s=math.nan, swapped_in_bytes=math.nan)]
    assert machine_use.machine_use(unknown) == MachineUse(None, None, 0.0, None, 5.0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_process_below_the_worker_is_the_runs_and_another_is_not(monkeypatch):
    """The counters of a living child, and of one that has ended."""
    before = machine_use._run_cpu_s()
    child = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        while machine_use._run_cpu_s() < before + 0.3:
            assert child.poll() is None
            time.sleep(0.05)
    finally:
        child.kill()
        child.wait()
    assert machine_use._run_cpu_s() >= before + 0.3


def test_short_windows_are_not_sampled_one_by_one(monkeypatch):
    clock = iter(x / 10 for x in range(10**6))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    watch, values = machine_use.MachineWatch(), []
    for _ in range(12):
        sample = watch.sample()
        values.append(watch.summarize([sample]))
    assert values[0].throttled_cpu_share is not None
    assert 2 < sum(use.throttled_cpu_share is None for use in values) < 11
    # What is counted since the sample before is of all the windows since then.
    later = [use.sampled_s for use in values[1:] if use.sampled_s is not None]
    assert later
    assert min(later) >= 0.5


def test_heat_and_the_containers_limit_hold_processors_back(tmp_path, monkeypatch):
    folder = tmp_path / "cpu0" / "thermal_throttle"
    folder.mkdir(parents=True)
    heat = folder / "core_throttle_total_time_ms"
    heat.write_text("1000\n")
    (tmp_path / "groups" / "job").mkdir(parents=True)
    group = tmp_path / "groups" / "job"
    (group / "cpu.max").write_text("100000 100000")
    (group / "cpu.stat").write_text("usage_usec 5\nthrottled_usec 2000000\n")
    (tmp_path / "cgroup").write_text("0::/job\n")
    monkeypatch.setattr(cgroups, "ROOT", tmp_path / "groups")
    monkeypatch.setattr(cgroups, "OF_PROCESS", tmp_path / "cgroup")
    monkeypatch.setattr(machine_use, "PROCESSORS", tmp_path)
    monkeypatch.setattr(machine_use, "_processors", lambda: frozenset({0, 1}))
    assert cgroups.throttled_s() == 2.0
    watch = machine_use.MachineWatch()
    heat.write_text("2000\n")
    (group / "cpu.stat").write_text("usage_usec 5\nthrottled_usec 3000000\n")
    *_, throttled_s, _ = watch.sample()
    assert throttled_s == pytest.approx(2 * 1.0 + 1.0)  # a second of both processors, and one
