"""Imports without Python's collector of cycles."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Import large packages in here, in a process that is ours to its end.

    They make some hundred thousand objects that stay, all of which the collector goes through
    time and again while there are ever more of them: a fifth of the time that torch takes, and
    again whenever it goes through everything in the midst of training. Afterwards it leaves
    out what is there by then.
    """
    if not gc.isenabled():  # somebody's decision, or within another
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
