"""Exchange requests to stop among ranks; fail if a thread is left of it."""

import sys
from pathlib import Path

from torch import distributed as dist

from accbench.distributed import process_group
from accbench.training.stopping import StopRequests


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


before = num_threads()
dist.init_process_group("gloo")
requests = StopRequests(30, Path(sys.argv[1]), dist.get_rank())
with requests:
    requests.agreed()
    assert num_threads() > before
process_group.close()
assert num_threads() == before
