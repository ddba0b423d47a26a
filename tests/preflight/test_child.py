"""Processes of preflight end with the process that started them."""

import contextlib
import signal

import psutil
import pytest

from tests.conftest import wait_until
from tests.preflight import running

pytest.importorskip("torch_xla")
pytestmark = [pytest.mark.xla, pytest.mark.usefixtures("as_users_have_it")]


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.soak), signal.SIGKILL]
)
def test_whoever_ends_preflight_ends_the_compiler_too(number, tmp_path) -> None:
    process = running.start(
        "--engine=xla", "--model=resnet18", "--batch_size=8", f"--keep={tmp_path / 'kept'}"
    )
    child: list[psutil.Process] = []

    def compiling() -> bool:
        assert process.poll() is None
        for found in psutil.Process(process.pid).children():
            with contextlib.suppress(psutil.Error):  # it has just ended
                if "accbench.preflight.compiling" in " ".join(found.cmdline()):
                    child.append(found)
        return bool(child)

    wait_until(compiling)
    process.send_signal(number)
    status, _, err = running.end(process)
    assert status == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert "Traceback" not in err
    wait_until(lambda: not child[0].is_running())
