"""A worker's process where accbench is installed; main.py is the same in a clone."""

import time

STARTED = time.perf_counter()  # before the imports, which a first step waits for too

if __name__ == "__main__":
    import sys

    from accbench import worker

    sys.exit(worker.main(started=STARTED))
