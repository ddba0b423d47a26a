"""Imports with Python's cyclic garbage collector paused."""

import atexit
import contextlib
import gc
from collections.abc import Iterator


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
        # Or bindings report as leaks what is still there at the end (nanobind, in triton 3.9).
        atexit.register(gc.unfreeze)
        gc.enable()
