"""What is needed to repeat a measurement: versions, commit, device."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = (
    "accbench", "torch", "torchvision", "torch_xla", "jax", "jaxlib", "jax-cuda12-plugin",
    "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt", "libtpu", "triton", "numpy",
    "pillow",
)  # fmt: skip

# Prefixes of environment variables that change how fast a run is.
_SPEED_PREFIXES = (
    "ACCBENCH_MALLOC", "CUDA_VISIBLE_DEVICES", "GLIBC_TUNABLES", "GOMP_", "KMP_", "LD_PRELOAD",
    "MALLOC_", "MKL_", "NCCL_", "OMP_", "PJRT_DEVICE", "PYTORCH_", "TORCHINDUCTOR_", "XLA_",
)  # fmt: skip


def environment() -> dict[str, str]:
    """Return the environment variables of this process that may change its speed."""
    return {
        name: os.environ[name] for name in sorted(os.environ) if name.startswith(_SPEED_PREFIXES)
    }


def versions() -> dict[str, str]:
    """Return version by name: Python, and the installed ones of the packages that matter."""
    version_of = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            version_of[package] = version(package)
        except PackageNotFoundError:
            continue
    return version_of


def commit() -> str | None:
    """Return accbench's commit, with `-dirty` appended where files differ.

    None outside a checkout.
    """
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():  # installed, perhaps inside someone else's checkout
        return None
    try:
        described = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip()


def cpu_name() -> str:
    """Return the processor's name as the kernel gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
