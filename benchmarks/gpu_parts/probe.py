"""What is on this machine, and its two ceilings: a large product and a large copy.

`python -m benchmarks.gpu_parts.probe cuda|cpu` ends with a line of JSON: `facts`, a list of lines.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from accbench.machine import doctor

_QUERY = "name,driver_version,memory.total,memory.used,clocks.max.sm,power.limit,temperature.gpu"


def main(device: str) -> None:
    """Print the facts."""
    facts = [_nvidia_smi()] if device == "cuda" else []
    facts += [doctor.render(doctor.examine(), "table")]
    facts += [_product(device), _copy(device), _jax(device)]
    print(json.dumps({"facts": [line for fact in facts for line in fact.splitlines()]}))


def _nvidia_smi() -> str:
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except OSError as error:
        return f"nvidia-smi: {error.strerror}"
    return f"nvidia-smi ({_QUERY}): {done.stdout.strip() or done.stderr.strip()}"


def _product(device: str) -> str:
    """Measure a product of two square bfloat16 matrices."""
    size = 8192 if device == "cuda" else 256
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * size**3 / _seconds(lambda: left @ right, device)
    return f"ceiling, bfloat16 product of {size}: {rate / 1e12:.1f} TFLOP/s"


def _copy(device: str) -> str:
    """Measure a copy within the device's memory, read and written bytes together."""
    source = torch.ones(2**30 if device == "cuda" else 2**20, device=device)
    target = torch.empty_like(source)
    rate = 2 * source.nbytes / _seconds(lambda: target.copy_(source), device)
    return f"ceiling, copy of {source.nbytes >> 20} MiB: {rate / 1e12:.3f} TB/s, read and written"


def _seconds(function: Callable[[], object], device: str, repeats: int = 10) -> float:
    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    function()
    wait()
    begun = time.perf_counter()
    for _ in range(repeats):
        function()
    wait()
    return (time.perf_counter() - begun) / repeats


def _jax(device: str) -> str:
    """Return what JAX sees, and how long it takes to start; the engine itself is tried later."""
    begun = time.perf_counter()
    code = "import jax; print(jax.__version__, jax.devices())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    lines = done.stdout.splitlines() or done.stderr.splitlines() or ["no output"]
    return f"JAX: {lines[-1]}, {time.perf_counter() - begun:.1f} s"


if __name__ == "__main__":
    main(sys.argv[1])
