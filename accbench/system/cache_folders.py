"""Where accbench, torch, Triton and JAX keep what they compile: in folders that can be written.

A container's user may have no home (`docker -u 12345`, OpenShift), or one that is read-only. What a
cache holds is loaded as code, so a folder in the shared temporary one must be the user's own.
"""

import contextlib
import os
import re
import stat
import tempfile
from pathlib import Path

from accbench.errors import RequestError
from accbench.system import user_name

# As tempfile looks for one, which goes on to the current folder.
_TEMPORARY = ("/tmp", "/var/tmp", "/usr/tmp")
_TEMPORARY_VARIABLES = ("TMPDIR", "TEMP", "TMP")
_REMEDY = "set XDG_CACHE_HOME, or TMPDIR, to a folder of your own that can be written"


def of_user() -> Path | None:
    """Return the user's cache folder, by the XDG base directory specification.

    None where accbench cannot write there.
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
    """Return the system's temporary folder; None where there is none to write into.

    The current folder, which Python takes then, is no place for what is temporary.
    """
    try:
        found = Path(tempfile.gettempdir())
    except FileNotFoundError:
        return None
    named = [os.environ[name] for name in _TEMPORARY_VARIABLES if os.environ.get(name)]
    is_meant = os.path.realpath(found) in map(os.path.realpath, (*named, *_TEMPORARY))
    return found if is_meant else None


def temporary_of(run_dir: Path) -> Path:
    """Return where a run's temporary folders are made: in its own folder where the system has none.

    Raises:
        OSError: that cannot be made.
    """
    found = temporary()
    if found is None:
        found = (run_dir / "tmp").absolute()
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
    return found


def root(run_dir: Path | None = None, loads_code: bool = False) -> Path:
    """Return the folder for caches of all kinds: the user's, or a temporary or the run's own.

    Args:
        run_dir: the run's folder, if there is one, for where nothing else can be written.
        loads_code: whether the file system must allow programs (it may be mounted noexec).

    Raises:
        RequestError: there is none.
    """
    own = of_user()
    if own is not None and not (loads_code and _is_noexec(own)):
        return own
    shared = temporary()
    if shared is not None and not (loads_code and _is_noexec(shared)):
        folder = shared / f"accbench-{os.geteuid()}"
        if is_own(folder):
            return folder
    if run_dir is not None and _can_be_written(run_dir):
        return run_dir.absolute() / "cache"
    raise RequestError(f"there is no folder to keep what is compiled in: {_REMEDY}")


def folder(name: str) -> Path:
    """Return accbench's cache folder NAME, which need not be there yet.

    Raises:
        RequestError: there is no place for it.
    """
    return root() / "accbench" / name


def environment(run_dir: Path | None) -> dict[str, str]:
    """Return the variables by which a worker's libraries find a user's name and folders to write.

    Empty where the user has all that. Without these, torch.hub and Triton make a folder named `~`.

    Raises:
        RequestError: there is no folder that can be written.
    """
    found = user_name.environment()
    if temporary() is None and run_dir is not None:
        try:
            found["TMPDIR"] = str(temporary_of(run_dir))
        except OSError as error:
            raise RequestError(f"cannot write to {run_dir}: {error.strerror}") from None
    if of_user() is None:
        caches = root(run_dir)
        found |= {
            "XDG_CACHE_HOME": str(caches), "TRITON_HOME": str(caches),
            "MPLCONFIGDIR": str(caches / "matplotlib"),
        }  # fmt: skip
    return found


def of_inductor(run_dir: Path | None) -> dict[str, str]:
    """Return the variables by which inductor's caches are in folders of the user's own.

    By itself it takes torchinductor_NAME in the temporary folder, whoever made that, and for its
    precompiled headers also where TORCHINDUCTOR_CACHE_DIR is set.

    Raises:
        RequestError: others own these, or nothing can be written.
    """
    shared = temporary()
    if shared is None:  # the run's own then
        return {}
    name = user_name.found()
    names = [name] if name else []
    if "LOGNAME" not in os.environ:  # which comes before USER
        names.append(user_name.stand_in())
    paths = {name: shared / f"torchinductor_{re.sub(_NOT_IN_NAMES, '_', name)}" for name in names}
    chosen = next((name for name, path in paths.items() if is_own(path)), None)
    if chosen is None:
        raise RequestError(
            f"{paths[names[0]]}, where torch.compile keeps what it loads as code, belongs to "
            "another user, or others may write there: remove it, or set TMPDIR to a folder of "
            "your own"
        )
    found = {} if chosen == name else {"LOGNAME": chosen}
    if _is_noexec(shared):
        found["TORCHINDUCTOR_CACHE_DIR"] = str(root(run_dir, loads_code=True) / "torchinductor")
    return found


# As torch replaces them (torch/_inductor/runtime/cache_dir_utils.py).
_NOT_IN_NAMES = r'[\\/:*?"<>|]'


def is_own(folder: Path) -> bool:
    """Make a folder, unless it is there; return whether the user alone can write into it."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError:
        return False
    found = folder.lstat()  # no link, which would lead to another's
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not is_ours or found.st_mode & stat.S_IWOTH:
        return False
    if found.st_mode & stat.S_IWGRP:  # as torch makes it under the umask 002, the user's group's
        folder.chmod(stat.S_IMODE(found.st_mode) & ~stat.S_IWGRP)
    return os.access(folder, os.W_OK | os.X_OK)


def _can_be_written(folder: Path) -> bool:
    """Return whether a folder is there to be written, or can be made."""
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError:  # a parent that is not to be looked into, or a name that is too long
        return False
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def _is_noexec(folder: Path) -> bool:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return bool(os.statvfs(there).f_flag & os.ST_NOEXEC)
