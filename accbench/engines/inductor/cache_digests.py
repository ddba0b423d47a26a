"""Digests of torch's and Triton's files, which are in the keys of inductor's compile cache."""

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

from torch._inductor import codecache

# Modules that inductor takes Triton's digest from, before torch 2.15.
_HOLDERS = ("triton.compiler.compiler", "torch._inductor.runtime.triton_compat")


def begin(device_type: str) -> None:
    """Have threads compute the digests, where the first step would wait for them else.

    Hashing lets other threads run meanwhile. On a CPU nothing is made of Triton's files, which are
    half a gigabyte, so its place in the keys is left empty.
    """
    if device_type == "cpu":
        with contextlib.suppress(Exception):  # the keys then name Triton's files, and all is right
            _leave_triton_out()
    else:
        _compute_in_thread(_triton_key)
    _compute_in_thread(codecache.torch_key)


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


def _compute_in_thread(key: Callable[[], Any]) -> None:
    def compute() -> None:
        with contextlib.suppress(Exception):  # the main thread will meet it, too
            key()

    threading.Thread(target=compute, name="digest", daemon=True).start()
