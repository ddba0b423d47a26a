"""What torch_xla needs on NVIDIA GPUs and not on other devices."""

import os
import socket
from importlib.metadata import entry_points

from accbench.config import TaskConfig
from accbench.distributed import process_group
from accbench.pjrt import nvidia


def problem(task: TaskConfig) -> str | None:
    """Return why torch_xla cannot use the GPUs here, and the remedy; None if it can."""
    gpu_problem = nvidia.problem(task.nproc_per_node)
    if gpu_problem is not None:
        return gpu_problem
    plugins = entry_points(group="torch_xla.plugins", name="CUDA")
    has_other_plugin = any(not plugin.module.startswith("accbench.") for plugin in plugins)
    library = nvidia.find_plugin()
    if not has_other_plugin and (library is None or not library.exists()):
        where = "is not installed" if library is None else f"is not at {library}"
        return (
            f"torch_xla needs a PJRT plugin for CUDA, which {where}: {nvidia.install_command()}, "
            "or use --device cpu to train on the CPU"
        )
    return None


def register(world_size: int) -> None:
    """Register the PJRT plugin with torch_xla, and give all ranks the coordinator's port."""
    from torch_xla.experimental import plugins

    from accbench.pjrt import cuda

    if "CUDA" not in entry_points(group=cuda.ENTRY_POINT_GROUP).names:
        # accbench on PYTHONPATH, not installed; with an entry point torch_xla has done this.
        plugins.use_dynamic_plugins()
        plugins.register_plugin("CUDA", cuda.plugin())
    if world_size > 1:
        # Rank 0 picks a free port; by default torch_xla takes one next to the rendezvous' port.
        port = process_group.broadcast_value(_free_port())
        os.environ.setdefault(cuda.COORDINATOR_PORT_VARIABLE, str(port))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
