"""A GPU's day: items end in their time, failures are kept, a second call goes on."""

import dataclasses
import json
import sys
import time

import psutil
import pytest

from accbench import config
from accbench.comparing import plan
from accbench.pjrt import gpu
from benchmarks import gpu_day
from benchmarks.gpu_parts import bounds, kernels, page
from benchmarks.gpu_parts import items as parts

PROGRAM = """HloModule jit_step, is_scheduled=true

%f (p0: f32[1000,1000]) -> f32[1000,1000] {
  %p0 = f32[1000,1000]{1,0} parameter(0)
  ROOT %add.1 = f32[1000,1000]{1,0} add(%p0, %p0)
}

ENTRY %main (a: f32[1000,1000]) -> f32[1000,1000] {
  %a = f32[1000,1000]{1,0} parameter(0)
  ROOT %loop_add-fusion.1 = f32[1000,1000] fusion(%a), kind=kLoop, calls=%f, metadata={op_name="n"}
}
"""


def item(name: str, code: str, limit_s: float = 60) -> parts.Item:
    return parts.Item(name, limit_s, [sys.executable, "-c", code], parts.last_json)


def test_a_failure_is_kept_and_the_next_call_does_it_again(tmp_path):
    counting = f"open({str(tmp_path / 'calls')!r}, 'a').write('x'); print('{{\"step_ms\": 2.5}}')"
    failing = "import sys\nfor n in range(50): print(f'line {n}', file=sys.stderr)\nsys.exit(3)"
    day = [item("good", counting), item("bad", failing), item("mute", "pass")]
    rows = gpu_day.run_all(day, tmp_path / "state", tmp_path / "out", 300)
    assert [row.get("error") for row in rows][:2] == [None, "exit status 3"]
    assert rows[1]["stderr"] == [f"line {n}" for n in range(20, 50)]
    assert rows[2]["error"].startswith("nothing to read: ")
    text = (tmp_path / "out/results.md").read_text()
    assert "| good | - | - | - | 2.50 |" in text
    assert "line 20\n" in text
    assert "line 19\n" not in text
    assert "line 49" in (tmp_path / "out/log.txt").read_text()
    day[1] = item("bad", "print('{}')")
    rows = gpu_day.run_all(day[:2], tmp_path / "state", tmp_path / "out", 300)
    assert not any("error" in row for row in rows)
    assert (tmp_path / "calls").read_text() == "x"
    gpu_day.run_all(day[:1], tmp_path / "state", tmp_path / "out", 300, redo=True)
    assert (tmp_path / "calls").read_text() == "xx"
    kept = [json.loads(line) for line in (tmp_path / "out/results.jsonl").open()]
    assert [row["name"] for row in kept] == ["good"]


def test_a_comparison_that_judges_a_row_different_is_a_result_and_one_that_broke_is_none(tmp_path):
    day = parts.Day(tmp_path / "state", "cpu", is_tiny=True)
    (comparison,) = parts.choose(parts.all_items(day), "compare")
    pages = {"judged": "open('out/page.md', 'w').write('# differs')", "broken": "pass"}
    for name, leave_page in pages.items():
        folder = day.state / name
        code = (
            f"import os; os.makedirs({str(folder / 'out')!r}); os.chdir({str(folder)!r}); "
            f"{leave_page}; print('differs'); raise SystemExit(1)"
        )
        asked = dataclasses.replace(comparison, command=[sys.executable, "-c", code])
        row = gpu_day.run_item(asked, folder, 60)
        if name == "judged":
            assert "error" not in row
            assert (row["said"], row["page"]) == (["differs"], ["# differs"])
        else:
            assert row["error"].startswith("nothing to read: ")


def _has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_an_item_ends_in_its_time_with_all_its_processes(tmp_path):
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)"
    )
    begun = time.monotonic()
    (row,) = gpu_day.run_all([item("long", code, 4)], tmp_path / "state", tmp_path / "out", 300)
    assert row["error"] == "not done in 4 s"
    assert time.monotonic() - begun < 60
    pid = int((tmp_path / "state/long/out.txt").read_text())
    while not _has_ended(pid):  # killed, which takes the kernel a moment
        assert time.monotonic() - begun < 60
        time.sleep(0.05)
    assert gpu_day.run_all([item("late", "print('{}')")], tmp_path, tmp_path / "out", 1) == []


def test_kernels_are_matched_with_preflights_list():
    h100 = gpu.load("h100")
    timed = [kernels.Timed("loop_add_fusion_1", 0.01, 1.0), kernels.Timed("gemm", 0.5, 2.0)]
    rows = kernels.against_bounds(timed, PROGRAM, h100)
    unknown, known = rows  # what loses most stands first
    assert (unknown["name"], unknown["kind"], unknown["times"]) == (
        "gemm",
        "not in the program",
        None,
    )
    assert known["bound_ms"] == pytest.approx(1e3 * 8e6 / h100.bytes_per_s)
    assert known["times"] == pytest.approx(0.01 / known["bound_ms"])
    assert known["source"] == "n"
    assert "loop_add_fusion_1, loop fusion, n" in kernels.table(rows)[2]
    assert [row["ms"] for row in kernels.by_kind(rows)] == [0.5, 0.01]


def test_rows_stand_beside_committed_bounds(monkeypatch):
    rows = bounds.read()
    assert {row["model"] for row in rows} >= {"resnet50"}
    (first,) = (r for r in rows if (r["model"], r["dtype"]) == ("resnet50", "bfloat16")
                and "H100" in r["gpu_name"])  # fmt: skip
    row = {
        "name": "a",
        "model": "resnet50",
        "dtype": "bfloat16",
        "batch_size": 256,
        "wall_s": 1.0,
        "engine": "jax",
        "samples_per_s": 128 / first["bound_s"],
        "gpu_name": first["gpu_name"],
    }
    assert "| 50% |" in page.render([row])
    assert bounds.samples_per_s(rows, first["gpu_name"], {**row, "engine": "ddp"}) == pytest.approx(
        256 / first["eager_bound_s"]
    )
    assert "| - | - |" in page.render([{**row, "gpu_name": "another"}])


@pytest.mark.parametrize("is_tiny", [True, False])
def test_the_commands_of_all_items_are_taken(tmp_path, monkeypatch, is_tiny):
    """A flag that changes its name or range would end an item on the GPU's machine."""
    monkeypatch.delenv("ACCBENCH_FLAGS_JAX", raising=False)
    items = parts.all_items(parts.Day(tmp_path, "cpu", is_tiny))
    assert len({item.name for item in items}) == len(items)
    for item in items:
        if "main.py" in item.command:
            config.parse(item.command[item.command.index("main.py") + 1 :])
        elif "compare" in item.command:
            plan.parse(item.command[item.command.index("compare") + 1 :], "accbench compare")
    assert [item.name for item in parts.choose(items, "vit-fl,env")] == [
        "vit-float16-ddp", "vit-float16-jax", "vit-float16-inductor", "env",
    ]  # fmt: skip
