"""The start of torch_xla in a worker: its device, and its cache of compiled graphs."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from accbench.distributed.process_group import Topology
from accbench.engines.common import compile_cache_key
from accbench.engines.xla import cuda
from accbench.errors import RequestError
from accbench.system import cache_folders

PJRT_DEVICES = {"cpu": "CPU", "cuda": "CUDA", "tpu": "TPU"}
"""Device -> its name in PJRT_DEVICE."""


def open_device(device: str, topology: Topology) -> torch.device:
    """Open XLA's device of this rank.

    Args:
        device: "cpu", "cuda" or "tpu".
        topology: the ranks.

    Raises:
        RequestError: torch_xla came up on another device.
    """
    import torch_xla
    import torch_xla.core.xla_model as xm

    if device == "cuda":
        cuda.register(topology.world_size)
    if device != "cpu":
        from torch_xla._internal import pjrt

        pjrt.initialize_multiprocess(topology.local_rank, topology.local_world_size)
    opened: torch.device = torch_xla.device()
    wanted, got = PJRT_DEVICES[device], xm.xla_device_hw(opened)
    if got != wanted:  # as the client behind it says
        raise RequestError(
            f"--device {device}, but torch_xla came up on {got}; "
            "is PJRT_DEVICE set to something else?"
        )
    return opened


def enable_compile_cache(device: str, rank: int, options: Any) -> str:
    """Have torch_xla keep compiled graphs on disk, if the options say so.

    Call it before the first computation. A folder is void for other versions: these are
    torch_xla's two rules.

    Args:
        device: "cpu", "cuda" or "tpu".
        rank: this worker's; each has a folder of its own.
        options: the engine's.

    Returns:
        The folder, or `off: ` and the reason.

    Raises:
        RequestError: the folder cannot be made.
    """
    if options.compile_cache == "off":
        return "off: --xla.compile_cache off"
    if options.compile_cache == "auto" and device == "cpu":
        return "off: XLA on the CPU saves compiled graphs but cannot load them"
    folder = Path(options.cache_dir or cache_folders.folder("xla"))
    # What is compiled for a GPU has code for the processor, too.
    processor = compile_cache_key.processor_fingerprint()
    folder = folder / f"{version('torch_xla')}-{device}-{processor}" / f"rank{rank}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(
            f"compiled graphs cannot be kept in {folder}: {error.strerror}; name another "
            "folder by --xla.cache_dir, or keep none by --xla.compile_cache off"
        ) from error
    import torch_xla.runtime as xr

    xr.initialize_cache(str(folder))
    return str(folder)
