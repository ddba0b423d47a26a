"""XLA's own profile: how long each operation of a graph took on the device."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path

# How long `end` waits beyond the profile's own duration.
_GRACE_S = 60.0


def start(folder: Path, rank: int, expected_s: float) -> Callable[[], None]:
    """Profile for `expected_s` seconds, and return a function that waits for the end.

    torch_xla takes a profile by asking a server in the process that is profiled. The result is
    `folder/xla-rankN/plugins/profile/TIME/*.xplane.pb`, which XProf shows.
    """
    import torch_xla.debug.profiler as profiler

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = profiler.start_server(port, only_on_master=False)
    rank_folder = folder / f"xla-rank{rank}"
    rank_folder.mkdir(parents=True, exist_ok=True)
    arguments = (f"127.0.0.1:{port}", str(rank_folder), max(1, round(1000 * expected_s)))
    client = threading.Thread(target=profiler.trace, args=arguments, daemon=True)
    client.start()

    def end() -> None:
        client.join(expected_s + _GRACE_S)
        nonlocal server
        server = None

    return end
