"""What a container or a scheduler's job may use of a machine."""

import os

import pytest

from accbench import config, resolving
from accbench.machine import doctor
from accbench.system import cgroups


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Writes files as /sys/fs/cgroup has them; paths below it to contents."""

    def write(of_process: str, **files: str) -> None:
        (tmp_path / "self").write_text(of_process)
        for path, content in files.items():
            path = tmp_path / "fs" / path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    monkeypatch.setattr(cgroups, "ROOT", tmp_path / "fs")
    monkeypatch.setattr(cgroups, "OF_PROCESS", tmp_path / "self")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(16))
    # Asks another environment's Python, which imports torch for the answer.
    monkeypatch.setattr(doctor, "check_engines", lambda: [])
    return write


@pytest.mark.parametrize(
    ("of_process", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "250000 100000"}, 3),  # a container's own root
        ("0::/\n", {"cpu.max": "max 100000"}, 16),
        ("0::/\n", {}, 16),
        ("", {}, 16),
        # The limit of a job counts for its steps.
        ("0::/job/step\n", {"job/cpu.max": "400000 100000", "job/step/cpu.max": "max 100000"}, 4),
        ("0::/docker/of-the-host\n", {"cpu.max": "20000 100000"}, 1),
        ("0::/\n", {"cpu.max": "9900000 100000"}, 16),
        (
            "3:cpu,cpuacct:/job\n2:memory:/\n",
            {"cpu/job/cpu.cfs_quota_us": "600000", "cpu/job/cpu.cfs_period_us": "100000"}, 6,
        ),
        ("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 16),
    ],
)  # fmt: skip
def test_threads_and_loading_processes_are_as_many_as_there_is_time_for(
    groups, of_process, files, cores
):
    groups(of_process, **files)
    task = resolving.apply_defaults(config.parse(["--nproc_per_node=2", "--data=synthetic"]), "cpu")
    assert task.threads == max(1, cores // 2)
    assert task.workers == min(8, task.threads)
    assert doctor.examine()["cores"] == cores


@pytest.mark.parametrize(
    ("of_process", "files", "expected"),
    [
        ("0::/\n", {"memory.max": "1073741824"}, 2**30),
        ("0::/\n", {"memory.max": "max"}, None),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "2147483648"}, 2**31),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, None),
    ],
)
def test_doctor_tells_the_memory_that_is_allowed(groups, of_process, files, expected):
    groups(of_process, **files)
    of_machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert doctor.examine()["memory_bytes"] == pytest.approx(expected or of_machine, rel=0.01)
