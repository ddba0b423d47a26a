"""What asks for a graceful stop, and what forces one."""

import os
import signal
import threading
import time

import pytest

from accbench.system.stop_signals import StopSignals


@pytest.mark.usefixtures("hangups_come")
@pytest.mark.parametrize("hangs_up", [False, True])
def test_a_hangup_may_be_known_of_after_the_ctrl_c_that_was_sent_behind_it(hangs_up, monkeypatch):
    """The kernel may give a hangup to another thread, which is run late."""
    monkeypatch.setattr("accbench.system.stop_signals.SAME_SIGNAL_S", 0.0)
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGINT)
        assert (signals.graceful, signals.forced) == (signal.SIGINT, None)
        time.sleep(0.01)
        late = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGHUP))
        if hangs_up:
            late.start()
        signal.raise_signal(signal.SIGINT)
        ordered = signals.forced
        if hangs_up:
            late.join()
    assert ordered == (None if hangs_up else signal.SIGINT)
