"""The self-test of each engine with one worker, all at once, for nothing is timed.

`python -m benchmarks.gpu_parts.self_tests cuda|cpu` ends with a line of JSON: `results`.
"""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

from accbench.machine import self_test

ENGINES = ("ddp", "inductor", "jax")


def main(device: str) -> int:
    """Test, and return 1 if an engine fails."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # they share the GPU
    with ThreadPoolExecutor() as pool:
        tests = [pool.submit(self_test.test_engine, e, device, 1, 200.0) for e in ENGINES]
        results = [test.result() for test in tests]
    print(json.dumps({"results": results}))
    return int(any(result["error"] for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
