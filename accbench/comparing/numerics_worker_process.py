"""A worker's process of the numerics pass, which its launcher starts."""

import sys
import time

STARTED = time.perf_counter()

if __name__ == "__main__":
    # `python -m` puts the current folder first in sys.path, where a user's file would hide a module
    # of the same name that torch imports. Not in a function: to import that would be too late.
    if not getattr(sys.flags, "safe_path", False):
        sys.path.append(sys.path.pop(0))
    from accbench.system.gc_pause import pause_gc

    with pause_gc():
        from accbench.comparing import numerics_worker

    sys.exit(numerics_worker.main(sys.argv[1:], STARTED))
