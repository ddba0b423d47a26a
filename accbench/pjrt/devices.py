"""Which kind of device this machine has for XLA."""

from pathlib import Path

import torch

from accbench.pjrt import nvidia


def found() -> str:
    """cuda, tpu or cpu; nothing is started to learn it."""
    if torch.cuda.is_available() or nvidia.present():
        return "cuda"
    return "tpu" if Path("/dev/accel0").exists() else "cpu"
