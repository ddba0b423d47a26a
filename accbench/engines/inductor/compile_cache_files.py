"""Files of inductor's compile cache that are cut off: found before their use, and made again.

torch takes a file that exists for a whole one, and the C++ compiler writes into the file itself.
A worker that is killed while it compiles leaves the beginning of a file, on which each later run
fails: "file too short", "invalid ELF header", "cannot read PCH file".
"""

import contextlib
import re
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from accbench.recording.terminal import log

# How each precompiled header of this process is built, by the file's path.
_header_builds: dict[Path, Callable[[], None]] = {}


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Make inductor check in the block what it finds in its cache, before it compiles or loads it.

    The size of a library or an object file is that of its ELF header, and the size of a source that
    of its text. Of a precompiled header the C++ compiler says whether it can be read.
    """
    from torch._inductor import codecache, output_code

    cache: Any = codecache
    graph: Any = output_code.CompiledFxGraph
    write, compile_cpp, write_graph = cache.write, cache._worker_compile_cpp, graph.write_to_disk
    if getattr(compile_cpp, "func", None) is _compile_checked:  # in a block within a block
        yield
        return

    def write_checked(content: str | bytes, *args: Any, **kwargs: Any) -> tuple[str, str]:
        name, path = write(content, *args, **kwargs)
        _rewrite_if_cut_off(Path(path), content)
        return name, path

    def write_graph_checked(self: Any) -> str:
        path: str = write_graph(self)
        _rewrite_if_cut_off(Path(path), self.source_code)
        return path

    cache.write, graph.write_to_disk = write_checked, write_graph_checked
    cache._worker_compile_cpp = partial(_compile_checked, compile_cpp)
    try:
        yield
    finally:
        cache.write, graph.write_to_disk = write, write_graph
        cache._worker_compile_cpp = compile_cpp


def remove_if_cut_off(path: Path, lock_path: Path) -> None:
    """Remove a file that a compiler has written in part.

    Args:
        path: the file, which may be missing.
        lock_path: torch's lock, under which the file is written.
    """
    if _is_whole(path):
        return
    with locked(lock_path):  # another worker may be writing it, or have made it again
        if not _is_whole(path):
            path.unlink(missing_ok=True)
            _log(path)


def torch_lock(path: Path) -> Path:
    """Return the path of the lock under which torch writes what it compiles to `path`."""
    from torch._inductor.codecache import get_lock_dir

    return Path(get_lock_dir()) / f"{path.name.partition('.')[0]}.lock"


def locked(lock_path: Path) -> contextlib.AbstractContextManager[Any]:
    """Return torch's lock of a file, held in its block."""
    from torch._inductor.codecache import LOCK_TIMEOUT
    from torch.utils._filelock import FileLock

    lock: contextlib.AbstractContextManager[Any] = FileLock(str(lock_path), timeout=LOCK_TIMEOUT)
    return lock


def _log(path: Path) -> None:
    log.warning(f"{path} is cut off, as a killed worker leaves it; it is made again")


def _is_whole(path: Path) -> bool:
    """Return whether nothing is missing at a file's end, or there is no file.

    An ELF file ends with its section headers, of which its header has the offset, the size and the
    number (elf(5)). The linker writes the header last: it is zero in a file cut off before that.
    """
    try:
        with path.open("rb") as file:
            header = file.read(64)
            size = file.seek(0, 2)
    except FileNotFoundError:
        return True
    if path.suffix not in (".so", ".o") or sys.platform != "linux":
        return size > 0
    if len(header) < 64 or header[:4] != b"\x7fELF":
        return False
    order = "<" if header[5] == 1 else ">"
    (offset,) = struct.unpack_from(f"{order}Q", header, 40)  # e_shoff of ELF64
    entry_size, num_entries = struct.unpack_from(f"{order}HH", header, 58)
    return bool(offset + entry_size * num_entries <= size)


def _rewrite_if_cut_off(path: Path, content: str | bytes) -> None:
    """Write a source again that is shorter than its text; torch has no lock, and renames."""
    from torch._inductor.codecache import write_atomic

    text = content.strip()  # as for the file's name: space at the ends may differ
    if path.stat().st_size < len(text.encode() if isinstance(text, str) else text):
        write_atomic(str(path), content)
        _log(path)


def _compile_checked(
    compile_cpp: Callable[..., None], lock_path: str, builders: Sequence[Any]
) -> None:
    """Compile with torch's `_worker_compile_cpp`, which builds what does not exist."""
    from torch._inductor.exc import CppCompileError

    build = partial(compile_cpp, lock_path, builders)
    headers = {}
    for builder in builders:
        target = Path(builder.get_target_file_path())
        remove_if_cut_off(target, Path(lock_path))
        if target.suffix in (".gch", ".pch"):
            _header_builds[target] = build
        if not target.exists():
            for header in _precompiled_headers(builder.get_command_line()):
                headers[header] = _version(header)
    try:
        build()
    except CppCompileError as error:
        if not headers or "PCH" not in str(error).partition("Output:")[2]:
            raise
        for header, version in headers.items():
            _remake_header(header, version)
        build()


def _precompiled_headers(command: str) -> list[Path]:
    """Return the precompiled headers that a compiler's command uses."""
    sources = re.findall(r"-include (\S+)", command)
    paths = [Path(f"{source}{suffix}") for source in sources for suffix in (".gch", ".pch")]
    return [path for path in paths if path.exists()]


def _remake_header(header: Path, version: Any) -> None:
    """Build a precompiled header again, unless it has changed since it had this version."""
    with locked(header.parent / "locks" / f"{header.name.partition('.')[0]}.lock"):
        if _version(header) == version:
            header.unlink(missing_ok=True)
            _log(header)
    # Without it the compiler reads the header's text, as where this process had built it unchecked.
    _header_builds.get(header, lambda: None)()


def _version(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns
