"""docs/first-hour.md: every block of the tutorial, in order, as a reader would run it."""

import contextlib
import importlib.util
import json
import os
import re
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import HANG_S, ROOT, start_python

PAGE = ROOT / "docs" / "first-hour.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


# `accbench` for the page's commands: has `forked_commands` run it in the folder where it is called.
CLIENT = """\
#!{python} -SE
import json, os, signal, socket, sys

def pass_on(number, _frame):
    with open({server!r} + str(os.getpid())) as file:
        os.kill(int(file.read()), number)

signal.signal(signal.SIGTERM, pass_on)
with socket.socket(socket.AF_UNIX) as server:
    server.connect({server!r})
    with server.makefile("rw") as stream:
        print(json.dumps([os.getpid(), os.getcwd(), sys.argv[1:]]), file=stream, flush=True)
        status, said = json.loads(stream.readline())
print(said, end="")
sys.exit(status)
"""


class Handler(socketserver.StreamRequestHandler):
    """Runs a command, and says how it ended and what it said."""

    def handle(self) -> None:
        pid, folder, arguments = json.loads(self.rfile.readline())
        options = {"folder": folder, "pid_file": f"{self.server.server_address}{pid}"}
        process = start_python(
            "-m", "tests.started", json.dumps(options),
            "-m", "tests.all_forked", "-m", "accbench", *arguments, XDG_CACHE_HOME=folder,
        )  # fmt: skip
        try:
            process.wait(HANG_S)
        finally:
            said = "".join(process.end())
        self.wfile.write(json.dumps([process.returncode, said]).encode() + b"\n")


@contextlib.contextmanager
def forked_commands(folder: Path) -> Iterator[Path]:
    """Yield a folder with an `accbench` whose processes are forked, with torch imported before."""
    folder.mkdir()
    address = str(folder / "server")
    command = folder / "accbench"
    command.write_text(CLIENT.format(python=sys.executable, server=address))
    command.chmod(0o755)
    with socketserver.UnixStreamServer(address, Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.1,))
        thread.start()
        try:
            yield folder
        finally:
            server.shutdown()
            thread.join()


def run_blocks(page: str, folder: Path, commands: Path | None) -> list[str]:
    """Save the page's files and run its commands in `folder`; return what each command printed.

    A block that begins with `# NAME` is the file NAME; one of bash is a command.

    Args:
        commands: a folder whose programs are found before those of the reader's environment.
    """
    # The reader's environment is active, and `accbench` is that of this clone.
    places = [*filter(None, [commands]), Path(sys.executable).parent, os.environ["PATH"]]
    path = os.pathsep.join(map(str, places))
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder)}
    printed = []
    for language, text in BLOCK.findall(page):
        if language != "bash":
            name = re.match(r"# (\S+)\n", text)
            assert name, f"a block of {language} names no file:\n{text}"
            (folder / name[1]).write_text(text)
            continue
        done = subprocess.run(
            ["bash", "-euc", text], cwd=folder, env=env, timeout=HANG_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        # Two short rounds judge nothing, and compare's status says so.
        allowed = (0, 1) if "accbench compare" in text else (0,)
        assert done.returncode in allowed, f"{text}\n{done.stdout}"
        printed.append(done.stdout)
    return printed


# Of the installed command, each process imports torch anew.
@pytest.mark.parametrize("command", ["forked", pytest.param("installed", marks=pytest.mark.soak)])
@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")
def test_a_reader_gets_through_the_first_hour(tmp_path_factory, tmp_path, command):
    with contextlib.ExitStack() as stack:
        commands = None
        if command == "forked":
            place = tmp_path_factory.mktemp("c") / "bin"  # short, for a socket's path
            commands = stack.enter_context(forked_commands(place))
        printed = run_blocks(PAGE.read_text(), tmp_path, commands)
    images, compared, report, killed, resumed, exported, used = printed
    assert images == ""
    assert "numerics  jax: 2 steps" in compared
    assert "round 2/2  ddp: " in compared
    assert (tmp_path / "compared" / "report.html").exists()
    assert "trains the same" in report
    assert "exit status 75" in killed
    assert "going on from" in resumed
    assert "done: 640 steps" in resumed
    assert "stripes.safetensors" in exported
    assert "weights are loaded" in used
