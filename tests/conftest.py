"""Runs accbench as a user would, and sees to it that a test leaves nothing behind."""

import atexit
import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from accbench.data import mock_images
from accbench.recording import records
from benchmarks.processes import free_port, rank_environments  # noqa: F401  # for tests
from tests import reused_parsers
from tests.forked import Forked, Forker, Fresh

ROOT = Path(__file__).parent.parent

# Seconds after which something hangs. Not a measure of speed: on a busy machine imports alone
# take minutes. pytest's own limit in pyproject.toml is longer.
HANG_S = 900

# A net and sizes with which two workers take a few steps in seconds.
TINY = (
    "--model=tests.nets:tiny",
    "--image_size=32",
    "--batch_size=4",
    "--amp_level=O0",
    "--workers=0",
    "--threads=1",
    "--tensorboard=off",  # whose import takes a second
    "--max_steps=6",
    "--warmup_steps=2",
    "--log_interval=2",
)


# What Python and torch start once, in the tests' own process, and keep until it ends.
HELPERS = (
    "multiprocessing.forkserver",
    "multiprocessing.resource_tracker",
    "torch/_inductor/compile_worker",
)


# What computes long, and tests of numbers and of what XLA makes, have what users have:
# `as_users_have_it`.
NOT_OPTIMISED = "--xla_backend_optimization_level=0"


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # while modules are imported, whose objects are there to the end
    # A shell that starts the tests in the background has them, and every process that
    # they start, ignore Ctrl-C, which some tests press.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Inductor else starts two Pythons with torch in them in every process, to see whether the
    # compiler knows the processor, and one more to compile in.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # Threads that wait for each other leave the cores to the other tests meanwhile.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Most of the time that XLA takes to compile for a CPU is LLVM's.
    os.environ.setdefault("XLA_FLAGS", NOT_OPTIMISED)
    reused_parsers.install()
    forker()  # for the environment as it is now


def pytest_unconfigure() -> None:
    forker().close()
    # Or bindings made with nanobind report as leaks what is still there when Python ends.
    atexit.register(gc.unfreeze)


# Which a fixture of a module has started anew, in place of such as a test has killed.
_OF_FIXTURES: set[psutil.Process] = set()


def leave_to_fixture(processes: Iterable[psutil.Process]) -> None:
    """Have a module's fixture end these, so that the test has not left them."""
    _OF_FIXTURES.update(processes)


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    environment = dict(os.environ)
    children = _children()
    yield
    if "TORCHINDUCTOR_CACHE_DIR" not in environment:  # torch notes its folder there when it is used
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    after = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    environment.pop("PYTEST_CURRENT_TEST", None)
    assert after == environment, "the test changed the environment"
    _, alive = psutil.wait_procs(_children() - children - _OF_FIXTURES, timeout=60)
    assert not alive, "the test left processes"


def _children() -> set[psutil.Process]:
    """All processes below this one, but not its helpers and theirs."""
    found = set()
    for child in psutil.Process().children():
        try:
            line = " ".join(child.cmdline())
            if "tests.forked" in line:
                found |= set(child.children(recursive=True))
            elif not any(helper in line for helper in HELPERS):
                found |= {child, *child.children(recursive=True)}
        except (psutil.NoSuchProcess, psutil.ZombieProcess):  # ended meanwhile
            continue
    return found


@pytest.fixture(scope="module")
def as_users_have_it() -> Iterator[None]:
    """XLA with LLVM's optimisation."""
    with pytest.MonkeyPatch.context() as patch:
        # Beside others, that JAX got in this process.
        flags = os.environ.get("XLA_FLAGS", "").split()
        patch.setenv("XLA_FLAGS", " ".join(flag for flag in flags if flag != NOT_OPTIMISED))
        yield


@pytest.fixture
def hangups_come() -> Iterator[None]:
    """Under nohup they are ignored, in the processes that a test starts as well."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _old_objects_are_no_garbage():
    """Collections, of which some modules ask for one after each test, scan new objects alone."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> Path:
    """A small mock ImageNet: 3 classes, 48 images to train and 12 to validate."""
    folder = tmp_path_factory.mktemp("images") / "mock"
    mock_images.make(folder, mock_images.MockImagePlan(num_classes=3, num_train=16, num_val=4))
    return folder


# Files that take long, longest first: begun last, one of them would keep a core to itself.
LONGEST = (
    "test_sharding", "test_compile_cache_files", "test_launcher", "test_jax", "test_numerics",
    "test_resume", "test_elastic", "test_compile_caches", "test_own_libraries", "test_steps",
    "test_fourier", "test_rounds", "test_inductor", "test_data_parallel", "test_slurm",
    "test_first_hour", "test_autograd", "test_faults", "test_own_loop", "test_raising",
    "test_stateful", "test_indices", "test_wrapped", "test_extending", "test_containers",
    "test_command", "test_policies", "test_recipes", "test_notebook", "test_doctor",
    "test_any_model", "test_step_cache", "test_graphs", "test_operations", "test_accelerate",
    "test_export",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        name = item.path.stem
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=place)


def command(*arguments: object, script: str = "launch_single_task.py") -> list[str]:
    return [sys.executable, script, *map(str, arguments)]


def run(*arguments: object, script: str = "launch_single_task.py"):
    """Run a script of the repository to its end; output as text."""
    return python(*command(*arguments, script=script)[1:])


def python(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS` in the repository's folder to its end; output as text."""
    process = start_python(*arguments, **env)
    try:
        status = process.wait(HANG_S)
    finally:
        said = process.end()
    return subprocess.CompletedProcess([*map(str, arguments)], status, *said)


def start_python(*arguments: object, **env: str) -> Forked | Fresh:
    """Likewise, under way: forked where that is the same."""
    words = [*map(str, arguments)]
    return forker().start(words, **env) if forker().can_run(words) else Fresh(words, **env)


@cache
def forker() -> Forker:
    return Forker()


def start_ranks(num_ranks: int, *arguments: object, **env: str) -> list[Forked | Fresh]:
    """`python ARGUMENTS` as often, each with the environment of a rank."""
    return [start_python(*arguments, **{**rank, **env}) for rank in rank_environments(num_ranks)]


def two_ranks(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS` twice, as torchrun starts it; what both say, and the first bad status."""
    return several_ranks(2, *arguments)


def several_ranks(num_ranks: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Likewise, with another number of ranks."""
    ranks = start_ranks(num_ranks, *arguments, PYTHONPATH=str(ROOT))
    try:
        wait_until(lambda: all(rank.poll() is not None for rank in ranks) or failed(ranks))
        for rank in ranks:  # where one failed, others may have their own to say, or wait
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(10)
        status = next(iter(failed(ranks)), 0)
    finally:
        out, err = map("".join, zip(*(rank.end() for rank in ranks), strict=True))
    return subprocess.CompletedProcess([*map(str, arguments)], status, out, err)


def failed(processes: Sequence[Forked | Fresh]) -> list[int]:
    """The statuses of those that have ended badly."""
    return [process.returncode for process in processes if process.poll()]


def read(run_dir: Path) -> list[records.Record]:
    return records.read(run_dir / "records.jsonl")


def of_kind(run_dir: Path, kind: type) -> list:
    return [record for record in read(run_dir) if isinstance(record, kind)]


def end_of(run_dir: Path) -> records.EndRecord:
    """The one end record, which is the last line."""
    ends = of_kind(run_dir, records.EndRecord)
    assert len(ends) == 1
    assert read(run_dir)[-1] == ends[0]
    return ends[0]


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """Processes, loaders included, whose environment or arguments name the run."""
    found = []
    for process in psutil.process_iter():
        try:
            named = "\0".join([*process.cmdline(), *process.environ().values()])
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        if str(run_dir) in named and process.pid != os.getpid():
            found.append(process)
    return found


def wait_until(condition) -> None:
    """Wait for `condition()`; fail the test if it does not come."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def wait_for_windows(process: Any, run_dir: Path, num_windows: int) -> None:
    """Wait until a run has done so many windows, or has ended."""
    file = run_dir / "records.jsonl"
    wait_until(
        lambda: (
            process.poll() is not None
            or (file.exists() and len(of_kind(run_dir, records.WindowRecord)) >= num_windows)
        )
    )


@contextlib.contextmanager
def under_way(
    run_dir: Path, arguments: Sequence[str], num_windows: int, **options
) -> Iterator[subprocess.Popen[str]]:
    """A run that has done so many windows; if it still goes on at the block's end it is killed.

    Args:
        arguments: the command, as `command` gives it.
        options: of `subprocess.Popen`.
    """
    pipe = subprocess.PIPE
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, **options)
    try:
        wait_for_windows(process, run_dir, num_windows)
        yield process
    finally:
        process.kill()
        process.communicate(timeout=HANG_S)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A real file system of a few kilobytes at `folder`; skips the test where nobody may mount."""
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root mounts")
    if os.system(f"mount -t tmpfs -o size={size} tmpfs {folder} 2>/dev/null"):
        pytest.skip("mounting is not allowed here")
    try:
        yield
    finally:
        os.system(f"umount {folder}")
