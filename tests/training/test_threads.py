"""The number of torch's threads is set only where it is another: setting it changes MKL."""

import pytest

from tests import conftest


@pytest.mark.parametrize(("threads", "numbers_set"), [(2, []), (1, [1])])
def test_threads_are_set_only_where_they_differ(threads, numbers_set, tmp_path):
    done = conftest.python(
        "-m", "tests.training.kept_threads", tmp_path / "run", threads, OMP_NUM_THREADS="2"
    )
    assert done.returncode == 0, done.stderr
    assert f"set: {numbers_set}" in done.stdout
