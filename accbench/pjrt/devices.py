"""The kind of device that this machine has for XLA."""

from pathlib import Path

import torch

from accbench.pjrt import nvidia


def find(requested: str) -> str:
    """Return `--device` as cpu, cuda or tpu; auto is the accelerator that this machine has."""
    return detect() if requested == "auto" else requested


def detect() -> str:
    """Detect cuda, tpu or cpu without starting a device."""
    if torch.cuda.is_available() or nvidia.has_gpu():
        return "cuda"
    return "tpu" if Path("/dev/accel0").exists() else "cpu"
