"""How ranks that exchange requests to stop end."""

from tests.conftest import two_ranks


def test_no_thread_of_gloos_is_left_to_abort_the_end(tmp_path):
    (tmp_path / "logs").mkdir()
    done = two_ranks("-m", "tests.training.stop_group", tmp_path)
    assert done.returncode == 0, done.stderr
