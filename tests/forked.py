"""Commands of the tests forked from a Python that has imported what launchers import.

    python -m tests.forked DESCRIPTOR   (what `Forker` starts)

A launcher spends its first second of processor time on importing torch, a worker its first two,
and the tests start hundreds. `accbench compare` starts its launchers in the same way. A worker of
a launcher that was forked is forked from it, if its environment asks for nothing that a process
reads when it starts; in all else it is the process that the launcher would have started.

Of comparisons, `tests.compared` has the workers forked. What a test sends signals to starts as
anyone's by `tests.conftest.under_way`, or is forked by `tests.signals`; workers of Dask and of
Slurm start as anyone's.
"""

import atexit
import contextlib
import gc
import importlib
import json
import logging
import os
import runpy
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from multiprocessing import resource_tracker, util
from pathlib import Path
from typing import Any, NoReturn

from tests import reused_parsers

ROOT = Path(__file__).parent.parent
# What they import, and so what a forked one has at hand.
_IMPORTED = ("accbench.cli", "accbench.comparing.rounds", "accbench.launchers.local",
             "accbench.launchers.common.run", "accbench.report.publish", "accbench.training.worker",
             "accbench.comparing.numerics_worker", "torch._dynamo", "torch.distributed.fsdp",
             "torch.distributed.nn.functional", "torch.distributed.pipelining",
             "torchvision.models")  # fmt: skip
# What engines import besides, a second of processor time each. Beside torch_xla, which is imported
# without inductor, it stays away.
_OF_ENGINES = ("torch._inductor.compile_fx", "jax", "accbench.engines.jax.compiled_steps",
               "accbench.engines.jax.data_parallel")  # fmt: skip
_WORKERS = (
    [str(ROOT / "main.py")],
    ["-m", "accbench.training.worker_process"],
    ["-m", "accbench.comparing.numerics_worker_process"],
)
# What Python is asked to run: launchers, commands, the tests' own programs.
_OURS = ("launch_single_task.py", "main.py", "accbench", "benchmarks", "tests")
# Of these a worker sets itself what it needs, or they change nothing but its speed.
_SET_FOR_WORKERS = {"OMP_NUM_THREADS", "GLIBC_TUNABLES", "TORCH_WARM_POOL"}
# Set by scikit-learn when it is imported, for Intel's OpenMP, which torch here does not have.
_SET_BY_SCIKIT_LEARN = {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
# Read when Python or a library starts, which a forked process does not.
_READ_AT_START = ("PYTHON", "LD_", "GLIBC_", "MALLOC_", "OMP_", "MKL_", "KMP_", "TORCH_", "LANG",
                  "LC_", "HOME")  # fmt: skip
_MOST_BYTES = 1 << 20


class Forker:
    """A prepared Python, started when first needed; ends with the tests' own process.

    For commands in the environment of now, not in what a test makes of it.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._at_start = _read_at_start()

    def close(self) -> None:
        """End it, if it was needed."""
        if self._socket is not None:
            self._socket.close()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:  # a process that a test forked has its end as well
                self._process.kill()
                self._process.wait()
            self._socket = None

    def can_run(self, arguments: list[str]) -> bool:
        """Whether this would be the same in a forked process."""
        words = _without_flags(arguments)
        of_ours = words[words[0] == "-m"].startswith(_OURS)
        return of_ours and hasattr(os, "pidfd_open") and _read_at_start() == self._at_start

    def start(self, arguments: list[str], **env: str) -> "Forked":
        """`python ARGUMENTS` in the repository's folder; output to files.

        Args:
            env: beside what there is. Of all that a process reads when it starts, a PYTHONPATH,
                OMP_NUM_THREADS and what JAX reads are heeded.
        """
        output = Output()
        ours, theirs = socket.socketpair()
        with theirs:
            descriptors = [*output.descriptors(), theirs.fileno()]
            self.fork(_without_flags(arguments), {**os.environ, **env}, descriptors)
        return Forked(arguments, ours, output)

    def fork(self, words: list[str], environment: dict[str, str], descriptors: list[int]) -> None:
        """Run `python WORDS`, with descriptors of its output and errors, and to tell its status."""
        if self._socket is None:
            self._process, self._socket = _start()
        socket.send_fds(self._socket, [json.dumps([words, environment]).encode()], descriptors)


class Output:
    """What a command says, in files."""

    def __init__(self) -> None:
        self._files = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115

    def descriptors(self) -> tuple[int, int]:
        out, err = self._files
        return out.fileno(), err.fileno()

    def read(self) -> tuple[str, str]:
        """(out, err), after which nothing more can be said."""
        found = []
        for file in self._files:
            file.seek(0)
            found.append(file.read())
            file.close()
        return found[0], found[1]


class Forked:
    """A forked command under way, with what is used of `subprocess.Popen`."""

    def __init__(self, arguments: list[str], told: socket.socket, output: Output) -> None:
        self.args = [sys.executable, *arguments]
        self.returncode: int | None = None
        self._told, self._output = told, output

    def wait(self, timeout: float | None = None) -> int:
        """The status.

        Raises:
            subprocess.TimeoutExpired: it has not ended by then.
        """
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = int(self._told.recv(16) or -signal.SIGKILL)
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def end(self) -> tuple[str, str]:
        """(out, err); where it still goes on it is killed."""
        self._told.close()
        return self._output.read()


class Fresh(subprocess.Popen[str]):
    """The same of a process like any other."""

    def __init__(self, arguments: list[str], **env: str) -> None:
        self._output = Output()
        out, err = self._output.descriptors()
        super().__init__(
            [sys.executable, *arguments], cwd=ROOT, stdout=out, stderr=err, text=True,
            env={**os.environ, **env},
        )  # fmt: skip

    def end(self) -> tuple[str, str]:
        self.kill()
        self.wait()
        return self._output.read()


def _without_flags(arguments: list[str]) -> list[str]:
    return arguments[1:] if arguments[0] == "-B" else arguments


def _read_at_start(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_START) and name not in _SET_BY_SCIKIT_LEARN
    }


def _start() -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", str(theirs.fileno())],
            cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
        )  # fmt: skip
    return process, ours


def prepare() -> None:
    """Import what commands and their workers do."""
    from accbench.system.gc_pause import pause_gc

    of_engines = _OF_ENGINES if find_spec("jax") and not find_spec("torch_xla") else ()
    os.environ["TORCH_WARM_POOL"] = "0"  # no processes to compile in
    with pause_gc():
        for module in (*_IMPORTED, *of_engines):
            importlib.import_module(module)
        # Finds the plug-ins, and what the flags are.
        reused_parsers.install()
        importlib.import_module("accbench.config").parse([])
    del os.environ["TORCH_WARM_POOL"]


def _serve(requests: socket.socket) -> None:
    """Until the tests' own process closes its end, as it does when it dies."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, 3)
        if not request:
            return
        if os.fork() == 0:
            requests.close()
            _run_and_tell(*json.loads(request), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _run_and_tell(
    arguments: list[str], environment: dict[str, str], out: int, err: int, told: int
) -> NoReturn:
    """Wait for the command, which has no child that it did not start itself."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(told)
        _become(arguments, environment, out, err)
    ended = os.pidfd_open(pid)
    if ended not in select.select([ended, told], [], [])[0]:  # the tests have given it up
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        os.write(told, str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become(arguments: list[str], environment: dict[str, str], out: int, err: int) -> NoReturn:
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    if not stat.S_ISREG(os.fstat(1).st_mode):  # the streams of now are of files
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = sys.__stderr__ = os.fdopen(
            2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
    _take(environment)
    fork_workers()
    _run(arguments)


def _take(environment: dict[str, str]) -> None:
    """What Python and OpenMP read when they start."""
    before = os.environ.get("PYTHONPATH")
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # found before, by the one of then
    if (path := environment.get("PYTHONPATH")) and path != before:
        sys.path[1:1] = path.split(os.pathsep)
        _forget_plugins()
    if "OMP_NUM_THREADS" in environment:
        import torch

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    if (jax := sys.modules.get("jax")) is not None:
        _configure(jax.config, environment)
    if (codecache := sys.modules.get("torch._inductor.codecache")) is not None:
        codecache._HEADER_DIR = os.path.join(codecache.default_cache_dir(), "precompiled_headers")
        codecache._HEADER_LOCK_DIR = os.path.join(codecache._HEADER_DIR, "locks")


def _forget_plugins() -> None:
    """Look for them again, as there may be others."""
    from accbench.config import parsing, plugins

    for found in (plugins._all_entry_points, plugins.classes, parsing.flags_class_of):
        found.cache_clear()


def _configure(config: Any, environment: Mapping[str, str]) -> None:
    """Set what JAX reads when it is imported."""
    for name, value in [*config.values.items()]:
        if (text := environment.get(name.upper())) is not None:
            is_switch = isinstance(value, bool)
            kind = str if value is None else type(value)
            config.update(name, text.lower() in ("1", "true", "on") if is_switch else kind(text))


def _run(arguments: list[str]) -> NoReturn:
    """As `python ARGUMENTS` would, to the process's end."""
    is_module = arguments[0] == "-m"
    sys.argv = arguments[1:] if is_module else arguments
    status = 1
    try:
        if is_module:
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            status = end.code or 0
        else:
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    # As at the end of any Python: threads, atexit, buffers. An exit in the midst of `_serve`'s
    # stack would go through its frames, which are the prepared process's.
    finally:
        _finish(status)


def fork_workers() -> None:
    """Have torch elastic fork workers from this process."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    def start(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
        told = {name: value for name, value in env.items() if name not in _SET_FOR_WORKERS}
        here = {n: v for n, v in _read_at_start().items() if n not in _SET_FOR_WORKERS}
        is_worker = args[1] == "-u" and any([*args[2:]][: len(w)] == w for w in _WORKERS)
        if is_worker and _read_at_start(told) == here:
            return _Forked(args, env=env, start_new_session=True)
        return fresh(handler, args, env)

    fresh = subprocess_handler.SubprocessHandler._popen
    subprocess_handler.SubprocessHandler._popen = start  # type: ignore[assignment]


class _Forked(subprocess.Popen[bytes]):
    """A worker, forked instead of started."""

    def __init__(self, args: tuple[str, ...], env: dict[str, str], start_new_session: bool) -> None:
        self._environment = env
        super().__init__(args, env=env, start_new_session=start_new_session)

    def _execute_child(self, args: tuple[str, ...], *_: Any) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with warnings.catch_warnings():
            # Python 3.12 warns of threads, which here only wait.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _become_worker(list(args[2:]), self._environment)
        self.pid, self._child_created = pid, True


def reset_signals() -> None:
    """Handle signals as a Python that has just been started."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _become_worker(arguments: list[str], environment: dict[str, str]) -> NoReturn:
    """What is the launcher's own goes, as it would if another program took its place."""
    gc.freeze()  # or what the launcher has open is closed, by numbers that are others' by then
    os.setsid()
    reset_signals()
    atexit._clear()
    # As its import does, which was before. Without it what loading processes share stays, where the
    # collector has not come by.
    atexit.register(util._exit_function)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    tracker = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None
    logging.getLogger("torch.distributed.elastic").setLevel(logging.NOTSET)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]  # -u
    _take(environment)
    _run(arguments)


def _finish(status: int) -> NoReturn:
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    prepare()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
    _serve(socket.socket(fileno=int(sys.argv[1])))
