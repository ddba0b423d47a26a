"""Folders: one process at a time, and of any name."""

import os
import shutil
import subprocess

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


@pytest.mark.parametrize("environment", [{}, ASCII], ids=["locale", "no locale"])
def test_names_of_any_characters(environment, images, tmp_path):
    data, run_dir = tmp_path / f"{ODD_NAME} data", tmp_path / ODD_NAME
    shutil.copytree(images, data)
    flags = (*TINY, "--workers=1", f"--data=mock:{data}", f"--output_dir={run_dir}")
    result = subprocess.run(
        command(*flags), cwd=ROOT, env={**os.environ, **environment}, capture_output=True,
        timeout=600,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stderr == b""
    assert end_of(run_dir).status == "ok"
