"""A worker's process, which the launcher starts; in a clone, main.py."""

import sys
import time

STARTED = time.perf_counter()  # before the imports, which are part of the time to the first step


def main() -> int:
    """Train as the process's flags say, and return the exit status."""
    from accbench.system.gc_pause import pause_gc

    with pause_gc():
        from accbench.training import worker

    return worker.main(started=STARTED)


if __name__ == "__main__":
    # `python -m` puts the current folder first in sys.path, where a user's file would hide a module
    # of the same name that torch imports. Not in a function: to import that would be too late.
    if not getattr(sys.flags, "safe_path", False):
        sys.path.append(sys.path.pop(0))
    sys.exit(main())
