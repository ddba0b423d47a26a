"""One worker: `python main.py ...` alone, `torchrun --nproc_per_node=2 main.py ...` among others.

`launch_single_task.py` starts one of these a device. What a worker does, top to
bottom, stands in accbench/training/worker.py.
"""

import sys

from accbench.training import worker_process

if __name__ == "__main__":
    sys.exit(worker_process.main())
