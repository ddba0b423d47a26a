"""The process that compiles a traced program."""

import psutil
import pytest

from accbench.preflight import compiling
from tests.preflight import running

pytest.importorskip("torch_xla")
pytestmark = [pytest.mark.xla, pytest.mark.usefixtures("as_users_have_it")]


@pytest.mark.parametrize(
    ("plugin", "message"),
    [("/nope.so", "which is not at /nope.so"), ("libc", "is not a PJRT plug-in")],
)
def test_a_missing_or_wrong_plugin_is_one_line(plugin, message) -> None:
    if plugin == "libc":
        maps = psutil.Process().memory_maps()
        plugin = next(m.path for m in maps if "libc.so" in m.path or "libc-" in m.path)
    flags = ("--engine=xla", "--model=tests.nets:tiny", "--batch_size=8", "--image_size=32")
    status, _, err = running.end(running.start(*flags, ACCBENCH_CUDA_PLUGIN=plugin))
    assert (status, err.count("\n")) == (2, 1), err
    assert message in err


def test_a_flag_that_xla_does_not_know_ends_its_process_and_is_one_line() -> None:
    """XLA aborts on it."""
    flags = ("--engine=xla", "--model=tests.nets:tiny", "--batch_size=8", "--image_size=32")
    status, _, err = running.completed(*flags, "--xla.flags=xla_gpu_no_such_flag=1")
    assert (status, err.count("\n")) == (2, 1), err
    assert "xla_gpu_no_such_flag" in err


def test_a_dump_is_read_without_a_list_of_launches(tmp_path) -> None:
    folder = compiling.dump_folder(tmp_path)
    folder.mkdir()
    (folder / "module_1.gpu_after_optimizations.txt").write_text("HloModule step")
    assert compiling.read_dump(tmp_path) == ("HloModule step", "")
