"""What a number needs so that someone can repeat it: versions, commit, device."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("accbench", "torch", "torchvision", "torch_xla", "numpy", "pillow")

# Environment variables that change how fast a run is, by how their names begin.
_TELLING = (
    "CUDA_VISIBLE_DEVICES", "GLIBC_TUNABLES", "GOMP_", "KMP_", "LD_PRELOAD", "MALLOC_", "MKL_",
    "NCCL_", "OMP_", "PJRT_DEVICE", "PYTORCH_", "TORCHINDUCTOR_", "XLA_",
)  # fmt: skip


def environment() -> dict[str, str]:
    """Environment variables of this process that may change its speed."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_TELLING)}


def versions() -> dict[str, str]:
    """Version by name: Python, and the packages that are installed of those that matter."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """accbench's commit, `-dirty` behind it where files differ; None outside a checkout."""
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
    """The processor's name as the kernel gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
