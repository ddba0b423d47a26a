"""Digests of torch's and Triton's files, which are in the keys of inductor's compile cache."""

import contextlib
import hashlib
import importlib
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._inductor import codecache

KEPT_FILE = "accbench_torch_key.json"
"""File in inductor's cache folder with the digest of torch's files, as they were."""
# Modules that inductor takes Triton's digest from, before torch 2.15.
_HOLDERS = ("triton.compiler.compiler", "torch._inductor.runtime.triton_compat")
# Folders of torch's without modules.
_NO_SOURCES = ("__pycache__", "bin", "include", "lib", "share", "test")


def begin(device_type: str) -> None:
    """Have threads compute the digests, where the first step would wait for them else.

    Hashing lets other threads run meanwhile, but for its Python. So torch's digest is kept, and
    taken again while no file has another size or time of change, which is how Python keeps what it
    compiles. On a CPU nothing is made of Triton's files, which are half a gigabyte, so its place in
    the keys is left empty.
    """
    if device_type == "cpu":
        with contextlib.suppress(Exception):  # the keys then name Triton's files, and all is right
            _leave_triton_out()
    else:
        _in_thread(_triton_key)
    with contextlib.suppress(Exception):  # torch reads its files then, as it does by itself
        if _take_kept_torch_key():
            return
    _in_thread(_keep_torch_key)


def fingerprint(root: Path) -> str:
    """Return a digest of the names, sizes and times of change of the sources below a folder."""
    files, folders = [], [str(root)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir():
                    folders += [] if entry.name in _NO_SOURCES else [entry.path]
                elif not entry.name.endswith((".pyc", ".pyi")):
                    status = entry.stat()
                    files.append((entry.path, status.st_size, status.st_mtime_ns))
    return hashlib.sha256(repr(sorted(files)).encode()).hexdigest()


def _kept_file() -> Path:
    return Path(codecache.cache_dir()) / KEPT_FILE


def _fingerprint_of_torch() -> str:
    return fingerprint(Path(torch.__file__).parent)


def _take_kept_torch_key() -> bool:
    """Give torch its digest if one is kept of the same files, and return whether there was."""
    try:
        kept = json.loads(_kept_file().read_text(encoding="utf-8"))
        key = bytes.fromhex(kept["torch_key"])
    except (OSError, ValueError, TypeError, KeyError):  # none yet, or not one of ours
        return False
    if len(key) != hashlib.sha256().digest_size or kept["fingerprint"] != _fingerprint_of_torch():
        return False
    set_key: Callable[[bytes], None] = codecache.torch_key.set  # type: ignore[attr-defined]
    set_key(key)
    return True


def _keep_torch_key() -> None:
    before = _fingerprint_of_torch()
    kept = {"fingerprint": before, "torch_key": codecache.torch_key().hex()}
    if _fingerprint_of_torch() != before:  # a package is being installed
        return
    file = _kept_file()
    begun = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        begun.write_text(json.dumps(kept), encoding="utf-8")
        begun.replace(file)
    finally:  # nothing is left where the disk is full
        begun.unlink(missing_ok=True)


def _leave_triton_out() -> None:
    set_key = getattr(_own_triton_key(), "set", None)
    if set_key is not None:
        set_key(None)
        return
    # Before torch 2.15. Triton's own cache goes on with the digest. Inductor asks once, for what it
    # then keeps.
    holders: list[Any] = [sys.modules.get(name) for name in _HOLDERS]
    before = [(m, m.triton_key) for m in holders if hasattr(m, "triton_key")]
    try:
        for module, _ in before:
            module.triton_key = lambda: None
        codecache.CacheBase.get_system()
    finally:
        for module, key in before:
            module.triton_key = key


def _triton_key() -> Any:
    key = _own_triton_key()
    return (key or importlib.import_module(_HOLDERS[0]).triton_key)()


def _own_triton_key() -> Any:
    return getattr(codecache, "triton_key", None)


def _in_thread(function: Callable[[], Any]) -> None:
    def call() -> None:
        with contextlib.suppress(Exception):  # the main thread will meet it, too
            function()

    threading.Thread(target=call, name="digest", daemon=True).start()
