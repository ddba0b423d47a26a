"""Writable cache folders for what accbench, torch, Triton and JAX compile.

A container's user may have no home (`docker -u 12345`, OpenShift), or one that is read-only.
Programs load what a cache holds as code, so a folder inside the shared temporary folder must belong
to the user.
"""

import contextlib
import os
import re
import stat
import tempfile
from pathlib import Path

from accbench.errors import RequestError
from accbench.system import user_name

# The folders that tempfile tries before the current folder.
_TEMPORARY = ("/tmp", "/var/tmp", "/usr/tmp")
_TEMPORARY_VARIABLES = ("TMPDIR", "TEMP", "TMP")
_REMEDY = "set XDG_CACHE_HOME, or TMPDIR, to a folder of your own that can be written"


def user_folder() -> Path | None:
    """Return the user's cache folder, by the XDG base directory specification.

    It is None if accbench cannot write there.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    folders = [Path(named)] if named else []
    with contextlib.suppress(RuntimeError):  # no HOME, and no entry in the system's list of users
        folders.append(Path.home() / ".cache")
    fitting = (
        path for path in folders if path.is_absolute() and _can_be_written(path / "accbench")
    )
    return next(fitting, None)


def temporary() -> Path | None:
    """Return the system's temporary folder; None if none can be written.

    Python falls back to the current folder, which is not a place for temporary files.
    """
    try:
        folder = Path(tempfile.gettempdir())
    except FileNotFoundError:
        return None
    named = [os.environ[name] for name in _TEMPORARY_VARIABLES if os.environ.get(name)]
    is_temporary = os.path.realpath(folder) in map(os.path.realpath, (*named, *_TEMPORARY))
    return folder if is_temporary else None


def temporary_for_run(run_dir: Path) -> Path:
    """Return the folder for a run's temporary folders: the system's, or else one in the run's.

    Raises:
        OSError: the folder cannot be created.
    """
    folder = temporary()
    if folder is None:
        folder = (run_dir / "tmp").absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def root(run_dir: Path | None = None, loads_code: bool = False) -> Path:
    """Return the folder for caches of all kinds: the user's, a temporary one, or the run's.

    Args:
        run_dir: the run's folder, if there is one, used if nothing else can be written.
        loads_code: whether the file system must allow programs (it may be mounted noexec).

    Raises:
        RequestError: no folder can be written.
    """
    users = user_folder()
    if users is not None and not (loads_code and _is_noexec(users)):
        return users
    shared = temporary()
    if shared is not None and not (loads_code and _is_noexec(shared)):
        folder = shared / f"accbench-{os.geteuid()}"
        if make_private(folder):
            return folder
    if run_dir is not None and _can_be_written(run_dir):
        return run_dir.absolute() / "cache"
    raise RequestError(f"there is no folder to keep what is compiled in: {_REMEDY}")


def folder(name: str) -> Path:
    """Return accbench's cache folder `name`, which need not exist yet.

    Raises:
        RequestError: no folder can be written.
    """
    return root() / "accbench" / name


def environment(run_dir: Path | None) -> dict[str, str]:
    """Return the variables that give a worker's libraries a user name and writable folders.

    The result is empty if the user has all of that. Without these variables, torch.hub and Triton
    create a folder named `~`.

    Raises:
        RequestError: there is no folder that can be written.
    """
    variables = user_name.environment()
    if temporary() is None and run_dir is not None:
        try:
            variables["TMPDIR"] = str(temporary_for_run(run_dir))
        except OSError as error:
            raise RequestError(f"cannot write to {run_dir}: {error.strerror}") from None
    if user_folder() is None:
        caches = root(run_dir)
        variables |= {
            "XDG_CACHE_HOME": str(caches), "TRITON_HOME": str(caches),
            "MPLCONFIGDIR": str(caches / "matplotlib"),
        }  # fmt: skip
    return variables


def inductor_environment(run_dir: Path | None) -> dict[str, str]:
    """Return the variables that put inductor's caches into folders that belong to the user.

    By default inductor uses torchinductor_NAME in the temporary folder, whoever created that, and
    for its precompiled headers also if TORCHINDUCTOR_CACHE_DIR is set.

    Raises:
        RequestError: other users own these folders, or nothing can be written.
    """
    shared = temporary()
    if shared is None:  # TMPDIR is then the run's own
        return {}
    name = user_name.lookup()
    names = [name] if name else []
    if "LOGNAME" not in os.environ:  # it has priority over USER
        names.append(user_name.stand_in())
    paths = {name: shared / f"torchinductor_{re.sub(_NOT_IN_NAMES, '_', name)}" for name in names}
    chosen = next((name for name, path in paths.items() if make_private(path)), None)
    if chosen is None:
        raise RequestError(
            f"{paths[names[0]]}, where torch.compile keeps what it loads as code, belongs to "
            "another user, or others may write there: remove it, or set TMPDIR to a folder of "
            "your own"
        )
    variables = {} if chosen == name else {"LOGNAME": chosen}
    if _is_noexec(shared):
        variables["TORCHINDUCTOR_CACHE_DIR"] = str(root(run_dir, loads_code=True) / "torchinductor")
    return variables


# Characters that torch replaces (torch/_inductor/runtime/cache_dir_utils.py).
_NOT_IN_NAMES = r'[\\/:*?"<>|]'


def make_private(folder: Path) -> bool:
    """Make a folder, unless it exists; return whether only the user can write into it."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError:
        return False
    status = folder.lstat()  # not following links, which may lead to another user's folder
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_ours or status.st_mode & stat.S_IWOTH:
        return False
    if status.st_mode & stat.S_IWGRP:  # torch creates it so under the umask 002
        folder.chmod(stat.S_IMODE(status.st_mode) & ~stat.S_IWGRP)
    return os.access(folder, os.W_OK | os.X_OK)


def _can_be_written(folder: Path) -> bool:
    """Return whether a folder can be written, or can be created."""
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError:  # a parent that may not be read, or a name that is too long
        return False
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def _is_noexec(folder: Path) -> bool:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return bool(os.statvfs(existing).f_flag & os.ST_NOEXEC)
