"""Threads on a CPU: torch's are left as they are, and none of ours takes a processor from them."""

import pytest

from tests import conftest
from tests.conftest import TINY, run


@pytest.mark.parametrize(("threads", "numbers_set"), [(2, []), (1, [1])])
def test_threads_are_set_only_where_they_differ(threads, numbers_set, tmp_path):
    done = conftest.python(
        "-m", "tests.training.kept_threads", tmp_path / "run", threads, OMP_NUM_THREADS="2"
    )
    assert done.returncode == 0, done.stderr
    assert f"set: {numbers_set}" in done.stdout


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_without_loading_processes_batches_are_made_between_steps(workers, images, tmp_path):
    """torch's threads wait for each other at each operation, and so for a thread that decodes."""
    flags = ("--model=tests.nets:fetches_beside", f"--data=imagefolder:{images}")
    done = run(*TINY, *flags, f"--workers={workers}", f"--output_dir={tmp_path / 'run'}")
    assert ("a thread fetches batches" in done.stderr) == (workers > 0), done.stderr
    assert done.returncode == (workers > 0), done.stderr
