"""Folders: one process at a time, and of any name."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT, TINY, command, end_of, run, wait_until

ODD_NAME = """two words, #1: a "quote", it's ☃ 🙂"""
# As on a machine without any locale, and without Python's remedy for it.
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize("script", ["launch_single_task.py", "main.py"])
def test_a_folder_belongs_to_one_run_until_it_is_killed(script, tmp_path):
    run_dir = tmp_path / "run"
    flags = (*TINY, "--model=tests.nets:slow", "--data=synthetic", f"--output_dir={run_dir}")
    first = subprocess.Popen(
        command(*flags, "--max_steps=9000", script=script), cwd=ROOT, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until((run_dir / "records.jsonl").exists)
        second = run(*flags, script=script)
    finally:
        first.kill()
        first.wait()
    assert second.returncode == 2
    assert f"another process is at work in {run_dir}" in second.stderr
    assert len(second.stderr.splitlines()) == 1
    third = run(*flags, script=script)
    assert third.returncode == 2
    assert f"{run_dir} already holds a run" in third.stderr


def flags_with_odd_names(images: Path, tmp_path: Path) -> tuple[str, ...]:
    data = tmp_path / f"{ODD_NAME} data"
    shutil.copytree(images, data)
    return (*TINY, "--workers=1", f"--data=mock:{data}", f"--output_dir={tmp_path / ODD_NAME}")


def test_names_of_any_characters(images, tmp_path):
    result = run(*flags_with_odd_names(images, tmp_path))
    assert (result.returncode, result.stderr) == (0, "")
    assert end_of(tmp_path / ODD_NAME).status == "ok"


def test_names_of_any_characters_without_a_locale(images, tmp_path):
    result = subprocess.run(
        command(*flags_with_odd_names(images, tmp_path)), cwd=ROOT, env={**os.environ, **ASCII},
        capture_output=True, timeout=600,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, b"")
    assert end_of(tmp_path / ODD_NAME).status == "ok"
