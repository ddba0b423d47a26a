"""A worker's process: what the launcher starts, and main.py in a clone."""

import sys
import time

STARTED = time.perf_counter()  # before the imports, which a first step waits for too


def main() -> int:
    """Train as the process's flags say; returns the exit status."""
    from accbench.system.gc_pause import pause_gc

    with pause_gc():
        from accbench.training import worker

    return worker.main(started=STARTED)


if __name__ == "__main__":
    # `python -m` puts the current folder first, where a file of a user's hides the module of
    # its name that torch imports.
    if not getattr(sys.flags, "safe_path", False):
        sys.path.append(sys.path.pop(0))
    sys.exit(main())
