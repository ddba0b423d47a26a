"""Imports with Python's cyclic garbage collector paused."""

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def pause_gc() -> Iterator[None]:
    """Pause the garbage collector for the block, in which large packages are imported.

    The process must be ours to its end, because the collector ignores all objects that exist at the
    end of the block. Imports create some hundred thousand permanent objects, which the collector
    would scan again and again as their number grows: a fifth of the time of torch's import, and
    again in each full collection during training.
    """
    if not gc.isenabled():  # someone has disabled it, or this call is nested
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(_shorten_last_collection)
        gc.enable()


def _shorten_last_collection() -> None:
    """Have Python not look for cycles when it ends, which takes half a second with torch imported.

    Bindings made with nanobind (triton's, from 3.9 on) would report as leaks what is still there.
    """
    bindings: Any = sys.modules.get("triton._C.libtriton")
    if bindings is not None and "nanobind" in type(bindings.ir.location).__module__:
        gc.unfreeze()
    else:
        gc.freeze()
