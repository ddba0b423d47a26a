"""A Python program whose own Pythons are forked from it, where that is the same as a start.

    python -m tests.all_forked [--import=MODULE:NAME] WORDS

Runs `python WORDS`, with a slow import done before. The Pythons that it starts by `subprocess` for
accbench, a benchmark or torchrun, and the fork servers of multiprocessing, are copies of it, which
have torch already; so are workers, as in `tests.forked`. One is started as ever where its
environment asks for what a process reads when it starts, or where threads that a copy would lack
may be at work.
"""

import gc
import importlib
import os
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker, util
from typing import Any, NoReturn

from tests import forked

_OURS = (*forked._OURS, "torch.distributed.run")
# The compiler for GPUs, which meets torch's libraries in no process of a user's.
_NEVER = {"accbench.preflight.compiling"}
# A copy heeds these as well: it keeps no output back, and looks for modules in the new path.
# The last is torchrun's, of NCCL alone.
_HEEDED = {
    *forked._SET_FOR_WORKERS, "PYTHONUNBUFFERED", "PYTHONPATH", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
}  # fmt: skip
_start, _spawn = subprocess.Popen._execute_child, util.spawnv_passfds


def main(words: list[str]) -> NoReturn:
    """Run the words, to the process's end."""
    if words[0].startswith("--import="):
        module, _, name = words.pop(0).removeprefix("--import=").partition(":")
        getattr(importlib.import_module(module), name)  # transformers imports what is asked for
    subprocess.Popen._execute_child = _fork_or_start
    util.spawnv_passfds = _fork_or_spawn
    forked._run(words)


def _fork_or_start(popen: subprocess.Popen, arguments: Any, *others: Any) -> None:
    """Fork in place of `Popen._execute_child`, whose arguments these are, if that is the same."""
    executable, preexec_fn, _, pass_fds, cwd, env, _, _, shell, *rest = others
    ends = rest[:6]
    words = None if executable or preexec_fn or pass_fds or shell else _words_of(arguments)
    env = dict(os.environ if env is None else env)
    if words is None or not _can_fork() or not _is_alike(env):
        _start(popen, arguments, *others)
        return
    pid = _fork()
    if pid == 0:
        _become(words, env, cwd, ends)
    popen.pid, popen._child_created = pid, True
    popen._close_pipe_fds(*ends)


def _fork_or_spawn(path: Any, arguments: Sequence[Any], descriptors: Iterable[int]) -> int:
    """Fork multiprocessing's fork servers; start its other processes."""
    if "multiprocessing.forkserver" not in str(arguments[-1]) or not _can_fork():
        return _spawn(path, arguments, descriptors)
    pid = _fork()
    if pid == 0:
        _become_fork_server(arguments[-1], descriptors)
    return pid


def _words_of(arguments: Any) -> list[str] | None:
    """Return what this Python is asked to run; None if it is another program, or not ours."""
    if isinstance(arguments, (str, bytes, os.PathLike)):
        return None
    program, *words = map(str, arguments)
    if words[:1] == ["-u"]:
        del words[0]
    name = "".join(words[1:2] if words[:1] == ["-m"] else words[:1])
    is_ours = name.removeprefix(f"{forked.ROOT}/").startswith(_OURS) and not _NEVER & {*words}
    return words if program == sys.executable and is_ours else None


def _can_fork() -> bool:
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and "torch_xla" not in sys.modules and not _has_jax_devices()


def _has_jax_devices() -> bool:
    """Whether JAX has come up, with threads of its own."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()


def _is_alike(env: Mapping[str, str]) -> bool:
    """Whether a process finds in this environment, when it starts, what this one has found."""
    here, there = (
        {name: value for name, value in forked._read_at_start(each).items() if name not in _HEEDED}
        for each in (os.environ, env)
    )
    return here == there and _path_of(os.environ) <= _path_of(env)


def _path_of(env: Mapping[str, str]) -> set[str]:
    return {*filter(None, env.get("PYTHONPATH", "").split(os.pathsep))}


def _fork() -> int:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of threads, which here only wait
        return os.fork()


def _become(words: list[str], env: dict[str, str], cwd: Any, ends: Sequence[int]) -> NoReturn:
    """Run the words in this copy, with its ends of `Popen`'s three pairs of pipes."""
    try:
        for number, end in enumerate((ends[0], ends[3], ends[5])):
            if end != -1:
                os.dup2(end, number)
        if cwd is not None:
            os.chdir(cwd)
        _forget_helpers()
        forked._become_worker(words, env)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _become_fork_server(code: str, descriptors: Iterable[int]) -> NoReturn:
    """Run what a new Python would be told to, with nothing open but what it would be given."""
    status = 1
    try:
        gc.freeze()  # or what is open here is closed, by numbers that are others' by then
        forked.reset_signals()
        first = 3
        for descriptor in sorted(map(int, descriptors)):
            os.closerange(first, descriptor)
            first = descriptor + 1
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
        _forget_helpers()
        exec(code, {})
        status = 0
    except SystemExit:  # as it ends
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _forget_helpers() -> None:
    """Forget the resource tracker and the fork server, whose lock is held while it is started."""
    server, tracker = forkserver._forkserver, resource_tracker._resource_tracker
    server._lock = threading.Lock()
    server._forkserver_pid = server._forkserver_address = server._forkserver_alive_fd = None
    server._inherited_fds = None
    tracker._fd = tracker._pid = None


if __name__ == "__main__":
    main(sys.argv[1:])
