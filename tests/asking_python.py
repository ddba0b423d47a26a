"""A `python` for other programs, such as a notebook's kernel, whose commands of ours are forked.

    with asking_python.made_in(folder, forker()): ...   # folder/python

What it is asked to run is forked by `tests.forked`, with its environment and its output; all else
is run by the tests' own Python.
"""

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.forked import ROOT, Forker

_PROGRAM = """\
#!{python} -S
import json, os, socket, sys
words = sys.argv[1:]
if words[:1] != ["launch_single_task.py"] and words[:2] != ["-m", "accbench"]:
    os.execv({python!r}, [{python!r}, *words])
ours, theirs = socket.socketpair()
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asked:
    asked.connect({address!r})
    request = json.dumps([words, {{**os.environ}}]).encode()
    socket.send_fds(asked, [request], [1, 2, theirs.fileno()])
theirs.close()
sys.exit(int(ours.recv(16) or 137))
"""


@contextlib.contextmanager
def made_in(folder: Path, forker: Forker) -> Iterator[None]:
    """Make `folder/python`, which works within the block and in the repository's folder."""
    assert Path.cwd() == ROOT
    program, address = folder / "python", str(folder / "asked")
    program.write_text(_PROGRAM.format(python=sys.executable, address=address))
    program.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        thread = threading.Thread(target=_serve, args=(listener, forker))
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _serve(listener: socket.socket, forker: Forker) -> None:
    with contextlib.suppress(OSError):  # it is shut down
        while True:
            asked, _ = listener.accept()
            with asked:
                request, descriptors, _, _ = socket.recv_fds(asked, 1 << 20, 3)
            words, environment = json.loads(request)
            forker.fork(words, environment, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
