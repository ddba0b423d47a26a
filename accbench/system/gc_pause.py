"""Imports without Python's garbage collector of cycles."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def pause_gc() -> Iterator[None]:
    """Pause the collector while large packages are imported, in a process that is ours to its end.

    They make some hundred thousand objects that stay, and the collector scans all of them again
    and again as their number grows: a fifth of the time that torch's import takes, and again
    whenever it scans everything during training. Afterwards it leaves out all objects that exist
    by then.
    """
    if not gc.isenabled():  # someone disabled it, or this is nested
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
