"""Inductor's compile cache: loaded at a second start, after a worker was killed, on a full disk."""

import os
import shutil
import subprocess
import sys
import threading

import pytest

from accbench.recording import records
from accbench.report import run as runs
from tests.conftest import HANG_S, ROOT, TINY, command, end_of, of_kind, python

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")

# Of more gradients than DDP's first bucket holds, and of more kernels than a test cuts off.
NET = "--model=tests.nets:of_two_buckets"


@pytest.fixture(scope="module")
def temporary(tmp_path_factory):
    """Where precompiled headers are, whatever the cache folder."""
    return tmp_path_factory.mktemp("temporary")


def train(folder, cache, temporary, *flags):
    return python(
        *command(
            *TINY, NET, "--engine=inductor", "--data=synthetic", f"--inductor.cache_dir={cache}",
            f"--output_dir={folder}", *flags,
        )[1:],
        TMPDIR=str(temporary),
    )  # fmt: skip


def losses(folder):
    return [window.loss for window in runs.read(folder).windows]


def kernels(cache):
    return sorted(cache.rglob("*.main.so"))


def cut(path, num_bytes):
    os.truncate(path, num_bytes)
    return path


def check_remade(done, folder, paths, sizes):
    """Whole again, and named once in the log of the worker that made it."""
    assert done.returncode == 0, done.stderr
    # A precompiled header's size differs by a few bytes.
    assert [path.stat().st_size for path in paths] == pytest.approx(sizes, rel=1e-3)
    logs = "".join(path.read_text() for path in folder.glob("logs/*"))
    said = [line for line in logs.splitlines() if "cut off" in line]
    assert sorted(line.split(" is cut off")[0].split()[-1] for line in said) == [*map(str, paths)]


@pytest.fixture(scope="module")
def cold(tmp_path_factory, temporary):
    """A run of two workers that had to compile, its cache, and what its launcher printed."""
    folder = tmp_path_factory.mktemp("cold")
    with pytest.MonkeyPatch.context() as patch:  # as below, which begins later
        patch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        first = train(folder / "run", folder / "cache", temporary, "--nproc_per_node=2")
    assert first.returncode == 0, first.stderr
    return folder / "run", folder / "cache", first.stdout


def test_two_workers_compile_once_and_a_second_start_loads_it(cold, temporary, tmp_path):
    """Cut where DDP's buckets end the model would be traced at every start."""
    run, cache, printed = cold
    libraries = {path for path in cache.rglob("*.so") if "precompiled" not in path.name}
    assert libraries
    warm = train(tmp_path, cache, temporary, "--nproc_per_node=2")
    assert warm.returncode == 0, warm.stderr
    for folder in (run, tmp_path):
        end = end_of(folder)
        assert (end.status, end.num_recompiles, end.num_fallbacks) == ("ok", 0, 0)
        assert end.num_graphs == 1
        (kept,) = cache.iterdir()  # a folder a processor
        assert of_kind(folder, records.RunRecord)[0].compile_cache == str(kept)
    now = {path for path in cache.rglob("*.so") if "precompiled" not in path.name}
    assert now == libraries
    # the same code on the same batches
    assert losses(tmp_path) == losses(run)
    assert "DDPOptimizer" not in printed + warm.stdout


def test_two_workers_make_again_what_a_killed_one_left(cold, temporary, tmp_path):
    run, cache, _ = cold
    libraries = kernels(cache)
    assert len(libraries) >= 3
    # The source too, which a power failure may cut off.
    broken = sorted([*libraries[:3], next(cache.rglob("*.py"))])
    sizes = [path.stat().st_size for path in broken]
    cut(libraries[0], 0)
    # Written before the ELF header, as the linker does.
    content = libraries[1].read_bytes()
    libraries[1].write_bytes(bytes(64) + content[64 : len(content) // 2])
    # Behind the header: loading it ends the process with SIGBUS.
    cut(libraries[2], 4096)
    cut(next(path for path in broken if path.suffix == ".py"), 1000)

    again = train(tmp_path, cache, temporary, "--nproc_per_node=2")
    check_remade(again, tmp_path, broken, sizes)
    assert losses(tmp_path) == losses(run)


def test_a_precompiled_header_that_is_cut_off_is_made_again(cold, temporary, tmp_path):
    _, cache, _ = cold
    kernels(cache)[0].unlink()  # or nothing would be compiled, and no header read
    (header,) = temporary.rglob("*.gch")
    size = header.stat().st_size
    cut(header, size // 2)
    again = train(tmp_path, cache, temporary)
    check_remade(again, tmp_path, [header], [size])


def test_vector_instructions_are_tried_once_a_cache_unless_a_try_was_cut_off(tmp_path):
    """Those of a try that was cut off would seem to be missing, and what was compiled with them
    would not compile again. torch 2.15 remembers tries by itself, and 2.8 by our file."""

    def pick():
        done = python("-m", "tests.engines.vector_tries", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
        assert done.returncode == 0, done.stderr
        num_tried, *picked = done.stdout.splitlines()[-1].split()
        return int(num_tried), picked

    num_tried, whole = pick()
    assert num_tried > 0
    assert len([*tmp_path.rglob("*.load_ok")]) == 1, "kinds behind the first that works were tried"
    assert pick() == (0, whole)
    assert whole
    tries = [*tmp_path.rglob("*.so")]
    assert tries
    for path in tries:
        cut(path, 1000)
    for marker in tmp_path.rglob("*.load_ok"):
        marker.unlink()
    assert pick()[1] == whole
    assert all(path.stat().st_size > 1000 for path in tries)


def test_a_file_that_another_worker_writes_is_not_removed(tmp_path):
    """Nor is it an error if another has removed it."""
    from torch.utils._filelock import FileLock

    from accbench.engines.inductor import compile_cache_files

    library, lock = tmp_path / "c1.main.so", tmp_path / "c1.lock"
    compile_cache_files.remove_if_cut_off(library, lock)
    library.write_bytes(b"")
    with FileLock(str(lock)):
        other = threading.Thread(
            target=compile_cache_files.remove_if_cut_off, args=(library, lock), daemon=True
        )
        other.start()
        other.join(0.2)
        assert library.exists()
        shutil.copyfile(sys.executable, library)
    other.join(HANG_S)
    assert library.exists()


MOUNT = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")


def can_mount():
    """Whether a file system of its own can be mounted for a process alone."""
    if shutil.which("unshare") is None:
        return False
    return not subprocess.run([*MOUNT, "mount -t tmpfs none /mnt"], capture_output=True).returncode


# No space for a folder, a source, what torch keeps of a graph, and a precompiled header. The first
# is an error of Python's in the one folder, the last a message of the C++ compiler's of the other,
# while a graph is compiled.
@pytest.mark.parametrize(
    ("full", "limit"),
    [("cache", "nr_inodes=1"), pytest.param("cache", "size=4k", marks=pytest.mark.soak),
     pytest.param("cache", "size=100k", marks=pytest.mark.soak),
     pytest.param("temporary", "size=20m", marks=pytest.mark.soak)],
)  # fmt: skip
def test_a_full_disk_is_a_line_with_its_remedy(tmp_path, temporary, full, limit):
    if not can_mount():
        pytest.skip("a small file system cannot be mounted here")
    cache = tmp_path / "cache"
    if full == "temporary":
        temporary = tmp_path / "temporary"
        temporary.mkdir()
    cache.mkdir()
    done = subprocess.run(
        [
            *MOUNT, f'mount -t tmpfs -o {limit} none "$0" && exec "$@"', str(tmp_path / full),
            *command(
                *TINY, "--engine=inductor", "--data=synthetic", f"--inductor.cache_dir={cache}",
                f"--output_dir={tmp_path / 'run'}",
            ),
        ],
        cwd=ROOT, env={**os.environ, "TMPDIR": str(temporary)}, capture_output=True, text=True,
        timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    # torch 2.8 logs one of its own, where it could not keep a graph, and goes on.
    assert "rank 0: Traceback" not in done.stderr + done.stdout
    line = done.stderr.strip().splitlines()[-1]
    assert f"no space left on device in {tmp_path / full}" in line
    assert {"cache": "--inductor.cache_dir", "temporary": "TMPDIR"}[full] in line
    assert end_of(tmp_path / "run").status == "error"
