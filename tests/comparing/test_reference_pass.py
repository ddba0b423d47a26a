"""The float64 reference as a command that can fail."""

import os
import subprocess
import sys

from accbench.report import run as runs
from tests.conftest import HANG_S, ROOT, TINY, end_of, small_disk


def test_a_full_disk_is_told_in_a_line(tmp_path):
    with small_disk(tmp_path / "disk", "100k"):
        run_dir = tmp_path / "disk" / "run"
        done = subprocess.run(
            [sys.executable, "-m", "accbench.comparing.numerics", "reference", "1", *TINY,
             "--data=synthetic", "--device=cpu", "--max_steps=200", f"--output_dir={run_dir}"],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
            text=True, timeout=HANG_S,
        )  # fmt: skip
        assert done.returncode == 2
        assert "No space left on device" in done.stderr
        assert "Traceback" not in done.stderr


def test_the_reference_trains_all_shards_in_one_process(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "accbench.comparing.numerics", "reference", "3", *TINY,
         "--data=synthetic", "--device=cpu", "--max_steps=2", f"--output_dir={tmp_path}"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert end_of(tmp_path).num_steps == 2
    kept = sorted(path.name for path in (tmp_path / "reference").iterdir())
    assert kept == [
        "facts.json", "start.safetensors", "step-0000.safetensors", "step-0001.safetensors",
    ]  # fmt: skip


def test_free_runs_are_drawn_in_a_pass_of_their_own(tmp_path):
    def phases(part: str, argument: str, name: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-m", "accbench.comparing.numerics", part, argument, *TINY,
             "--data=synthetic", "--device=cpu", "--max_steps=2",
             f"--output_dir={tmp_path / name}"],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
            timeout=HANG_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [record.phase for record in runs.read(tmp_path / name).numerics]

    phases("reference", "1", "reference")
    reference = str(tmp_path / "reference")
    assert not {"noise of free", "noise of free end"} & {*phases("floor", reference, "plain-ddp")}
    drawn = phases("free_draws", reference, "plain-ddp-free-draws")
    assert drawn == ["start", *(["noise of free"] * 2 + ["noise of free end"]) * 2]
