"""XLA's own profile: which of a graph's operations took how long on the device."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path

# Of the thread that waits for the profile beyond its own time.
_GRACE_S = 60.0


def start(folder: Path, rank: int, expected_s: float) -> Callable[[], None]:
    """Profile for `expected_s` seconds; returns what waits for the end of that.

    torch_xla takes a profile by asking a server in the process that is profiled. The result is
    `folder/xla-rankN/plugins/profile/TIME/*.xplane.pb`, which XProf shows.
    """
    import torch_xla.debug.profiler as profiler

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = profiler.start_server(port, only_on_master=False)
    at = folder / f"xla-rank{rank}"
    at.mkdir(parents=True, exist_ok=True)
    arguments = (f"127.0.0.1:{port}", str(at), max(1, round(1000 * expected_s)))
    asking = threading.Thread(target=profiler.trace, args=arguments, daemon=True)
    asking.start()

    def end() -> None:
        asking.join(expected_s + _GRACE_S)
        nonlocal server
        server = None

    return end
