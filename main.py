"""One worker: `python main.py ...` alone, `torchrun --nproc_per_node=2 main.py ...` among others.

`launch_single_task.py` starts one of these a device. What a worker does, top to
bottom, stands in accbench/worker.py.
"""

import time

STARTED = time.perf_counter()  # before the imports, which a first step waits for too

if __name__ == "__main__":
    import sys

    from accbench import worker

    sys.exit(worker.main(started=STARTED))
