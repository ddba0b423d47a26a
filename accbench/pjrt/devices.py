"""The kind of device that this machine has for XLA."""

from pathlib import Path

import torch

from accbench.pjrt import nvidia


def detect() -> str:
    """Detect cuda, tpu or cpu without starting a device."""
    if torch.cuda.is_available() or nvidia.has_gpu():
        return "cuda"
    return "tpu" if Path("/dev/accel0").exists() else "cpu"
