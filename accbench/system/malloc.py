"""The C library's heap: have it keep freed memory for the next tensors.

Or it asks the kernel for each large tensor's memory, page by page, and gives it back, step after
step. Launchers say so by GLIBC_TUNABLES before a worker starts; a process that nobody launched says
it by mallopt(3).
"""

import ctypes
import os

VARIABLE = "ACCBENCH_MALLOC"
"""`system` in it leaves the heap as it is."""

# From malloc.h. Nothing is mapped by itself, the top of the heap is not given back below this
# size, and all threads share one heap, since a thread's own goes back when it is empty.
_SETTINGS = {-4: 0, -1: 2**31 - 1, -8: 1}  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_ARENA_MAX


NOTICE = f"the heap keeps freed memory for the next tensors; {VARIABLE}=system leaves it alone"

is_kept = False
"""Whether `keep_memory` has changed this process's heap."""


def is_left_alone() -> bool:
    """Return whether the environment asks for the heap as it is."""
    return os.environ.get(VARIABLE) == "system"


def keep_memory() -> bool:
    """Have glibc keep freed memory in this process, and return whether that was done here.

    Nothing is done where GLIBC_TUNABLES is set, where ACCBENCH_MALLOC is `system`, or with another
    C library.
    """
    if "GLIBC_TUNABLES" in os.environ or is_left_alone():
        return False
    global is_kept
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018  # other libraries have a mallopt of their own
        is_kept = all([libc.mallopt(name, value) for name, value in _SETTINGS.items()])
    except (AttributeError, OSError, TypeError):
        return False
    return is_kept
