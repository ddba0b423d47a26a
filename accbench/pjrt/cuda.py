"""torch_xla's device plug-in `CUDA`: NVIDIA GPUs through the PJRT plugin that JAX ships.

torch_xla finds it through the entry point `CUDA` in the group `torch_xla.plugins`,
so that with accbench installed any torch_xla program runs with PJRT_DEVICE=CUDA.
Nothing here runs, and no environment variable is written, before a program asks
for the device. Every setting is an environment variable, see docs/cuda.md.
"""

import atexit
import os
from importlib.metadata import entry_points
from pathlib import Path

import torch_xla
from torch_xla.experimental import plugins

from accbench.pjrt import nvidia

ENTRY_POINT_GROUP = "torch_xla.plugins"
# Port of the coordinator of the processes' XLA clients; torch_xla's own name and fallback.
COORDINATOR_PORT_VARIABLE = "XLA_COORDINATOR_PORT"
_FALLBACK_PORT = 8547
_LARGEST_PORT = 65535


def plugin() -> plugins.DevicePlugin:
    """Return the plug-in to register: another package's if there is one, else this one."""
    for entry_point in entry_points(group=ENTRY_POINT_GROUP, name="CUDA"):
        if entry_point.module != __name__:
            return entry_point.load()()
    return CudaPlugin()


def is_another_installed() -> bool:
    """Return whether another package brings torch_xla to CUDA here."""
    plugins_named_cuda = entry_points(group=ENTRY_POINT_GROUP, name="CUDA")
    return any(entry_point.module != __name__ for entry_point in plugins_named_cuda)


class CudaPlugin(plugins.DevicePlugin):
    """A device plug-in that gives each process one GPU: that of its local rank."""

    def library_path(self) -> str:
        """Return the path of the plugin's library.

        Raises:
            RuntimeError: there is no GPU, or no such library; one line.
        """
        library = nvidia.find_plugin()
        problem = unavailable_reason()
        if problem is not None or library is None:
            # At exit torch_xla asks a second time for a client that never came up,
            # and aborts with a stack trace behind which nobody finds this line.
            atexit.unregister(torch_xla._prepare_to_exit)
            raise RuntimeError(problem)
        return str(library)

    def physical_chip_count(self) -> int:
        """Return how many processes `xmp.spawn` starts.

        GPU_NUM_DEVICES gives it, or else the number of GPUs that the driver shows.
        """
        return int(os.environ.get("GPU_NUM_DEVICES", 0)) or max(1, len(nvidia.driver().gpus))

    def configure_single_process(self) -> None:
        """Do nothing: one process without a rank is rank 0 of 1."""

    def requires_xla_coordinator(self) -> bool:
        """Return whether the processes need a coordinator: true for more than one.

        torch_xla asks this first and then reads the environment, so it is completed here.

        Raises:
            RuntimeError: as `library_path`; before a process waits for the others.
        """
        library = self.library_path()
        _complete_environment(library)
        return _world_size() > 1

    def client_create_options(self) -> dict[str, str | bool | int | list[int] | float]:
        """Return the options of XLA's GPU client.

        Their names are those of xla/pjrt/c/pjrt_c_api_gpu_internal.cc.
        """
        local_rank = _local_rank()
        return {
            "platform_name": "cuda",
            # XLA's own best-fit allocator, or CUDA's stream-ordered one.
            "allocator": "cuda_async" if _flag("PJRT_ALLOCATOR_CUDA_ASYNC") else "default",
            # Part of the GPU's memory that the allocator may take, 0..1.
            "memory_fraction": float(os.environ.get("PJRT_ALLOCATOR_FRACTION", 0.75)),
            # Taking it all at the start saves little, and hides what a program needs.
            "preallocate": _flag("PJRT_ALLOCATOR_PREALLOCATE"),
            # A process that is shown a single GPU (one a task, by a scheduler) has it as 0.
            "visible_devices": [0 if len(nvidia.driver().gpus) == 1 else local_rank],
            "node_id": _rank(),
            "num_nodes": _world_size(),
        }


def unavailable_reason() -> str | None:
    """Return why CUDA cannot be used here, one line with the remedy; None if it can."""
    problem = nvidia.driver().problem
    if problem is not None:
        return f"torch_xla cannot use CUDA: {problem}; use PJRT_DEVICE=CPU"
    library = nvidia.find_plugin()
    if library is None:
        command = nvidia.install_command()
        return f"torch_xla cannot use CUDA: no PJRT plugin is installed; {command}"
    if not library.exists():
        problem = f"{nvidia.PLUGIN_VARIABLE} names a file that does not exist: {library}"
        return f"torch_xla cannot use CUDA: {problem}"
    return None


def _complete_environment(library: str) -> None:
    toolkit = nvidia.toolkit(Path(library))
    flags = os.environ.get("XLA_FLAGS", "")
    if toolkit is not None and "xla_gpu_cuda_data_dir" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_cuda_data_dir={toolkit}".strip()
    nvidia.preload_compiler(Path(library))
    os.environ.setdefault(COORDINATOR_PORT_VARIABLE, str(coordinator_port()))


def coordinator_port() -> int:
    """Return the port next to the rendezvous port.

    Two jobs on a machine thus have two coordinators.
    """
    rendezvous = os.environ.get("MASTER_PORT")
    if rendezvous is None:
        return _FALLBACK_PORT
    return int(rendezvous) + 1 if int(rendezvous) < _LARGEST_PORT else int(rendezvous) - 1


def _flag(name: str) -> bool:
    return os.environ.get(name, "0").lower() in ("1", "true", "yes", "on")


def _local_rank() -> int:
    # torch_xla's own name first: `xmp.spawn` sets it, torchrun sets the other.
    for name in ("PJRT_LOCAL_PROCESS_RANK", "LOCAL_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    return 0


def _rank() -> int:
    return int(os.environ.get("RANK", _local_rank()))


def _world_size() -> int:
    for name in ("WORLD_SIZE", "PJRT_LOCAL_PROCESS_COUNT", "LOCAL_WORLD_SIZE"):
        if name in os.environ:
            return int(os.environ[name])
    return 1
