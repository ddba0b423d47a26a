"""NVIDIA GPUs, driver and CUDA packages of this machine, found without any framework.

The driver is asked through its own library, so nothing here needs torch, torch_xla or jax.
"""

import contextlib
import ctypes
import dataclasses
import hashlib
import importlib.util
import os
import shutil
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

from accbench.errors import RequestError
from accbench.system import cache_folders, extras

PLUGIN_VARIABLE = "ACCBENCH_CUDA_PLUGIN"  # path of a PJRT plugin for CUDA, before all others
_LIBDEVICE = "nvvm/libdevice/libdevice.10.bc"
# cuDeviceGetAttribute's numbers, CUDA driver API
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76


@dataclasses.dataclass(frozen=True)
class NvidiaGpu:
    """A GPU as the driver describes it."""

    name: str
    memory_bytes: int
    compute_capability: str
    """Such as 9.0."""


@dataclasses.dataclass(frozen=True)
class Driver:
    """The answers of the driver's library; `CUDA_VISIBLE_DEVICES` acts on them."""

    gpus: tuple[NvidiaGpu, ...] = ()
    cuda_version: str | None = None
    """The newest CUDA that the driver supports, such as 12.8."""
    problem: str | None = None
    """Why there is no GPU to use, one line; None if there is one."""


def install_command() -> str:
    """Return a shell command that installs the PJRT plugin for CUDA and its compiler."""
    # torch_xla wants the plugin of its own summer.
    is_beside_torch_xla = importlib.util.find_spec("torch_xla") is not None
    return extras.install_command("xla-cuda12" if is_beside_torch_xla else "preflight")


@cache
def driver() -> Driver:
    """Query the driver once a process. No context is made on any GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Driver(problem="the NVIDIA driver's library libcuda.so.1 is not on this machine")
    status = cuda.cuInit(0)
    if status != 0:
        return Driver(problem=f"the NVIDIA driver finds no GPU ({_error_name(cuda, status)})")
    number = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(number))
    cuda_version = f"{number.value // 1000}.{number.value % 1000 // 10}"
    cuda.cuDeviceGetCount(ctypes.byref(number))
    gpus = tuple(_describe(cuda, index) for index in range(number.value))
    if not gpus:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "" if hidden is None else f" (CUDA_VISIBLE_DEVICES is {hidden!r})"
        return Driver((), cuda_version, f"the NVIDIA driver shows no GPU{why}")
    return Driver(gpus, cuda_version)


def problem(num_workers: int) -> str | None:
    """Return why so many workers cannot have a GPU each here, and the remedy; None if they can."""
    found = driver()
    if found.problem is not None:
        return f"--device cuda: {found.problem}; use --device cpu to train on the CPU"
    if num_workers > len(found.gpus):
        return (
            f"--nproc_per_node {num_workers} is more than the {len(found.gpus)} "
            f"CUDA devices here ({found.gpus[0].name})"
        )
    return None


def _error_name(cuda: ctypes.CDLL, status: int) -> str:
    name = ctypes.c_char_p()
    if cuda.cuGetErrorName(status, ctypes.byref(name)) != 0 or not name.value:
        return f"error {status}"
    return name.value.decode()


def _describe(cuda: ctypes.CDLL, index: int) -> NvidiaGpu:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name, memory_bytes = ctypes.create_string_buffer(256), ctypes.c_size_t()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory_bytes), device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device)
    return NvidiaGpu(name.value.decode(), memory_bytes.value, f"{major.value}.{minor.value}")


def has_gpu() -> bool:
    """Return whether there is a GPU that nobody hid, be it usable or not."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or bool(driver().gpus)


def find_plugin() -> Path | None:
    """Find the PJRT plugin for CUDA: `ACCBENCH_CUDA_PLUGIN`, or that of an installed JAX package.

    jax itself is neither needed nor imported: the package is a folder with a library.
    """
    chosen = os.environ.get(PLUGIN_VARIABLE)
    return Path(chosen) if chosen else _library_in(("xla_cuda12", "xla_cuda13"))


def find_jax_plugin() -> Path | None:
    """Find the PJRT plugin for CUDA that JAX itself loads; None if JAX has none for CUDA."""
    cuda_versions = [v for v in (13, 12) if importlib.util.find_spec(f"jax_cuda{v}_plugin")]
    return _library_in([f"xla_cuda{v}" for v in cuda_versions])


def _library_in(packages: Sequence[str]) -> Path | None:
    for package in packages:
        for folder in _package_folders(f"jax_plugins.{package}"):
            library = folder / "xla_cuda_plugin.so"
            if library.exists():
                return library
    return None


def plugin_version() -> str | None:
    """Return the package and version of `find_plugin`'s, such as `jax-cuda12-pjrt 0.6.2`.

    None where there is no plugin, or no package is installed in its place.
    """
    library = find_plugin()
    if library is None:
        return None
    site = library.parent.parent.parent  # SITE/jax_plugins/xla_cuda12/xla_cuda_plugin.so
    for package in ("jax-cuda12-pjrt", "jax-cuda13-pjrt"):
        for found in distributions(name=package, path=[str(site)]):
            if f"xla_{package.split('-')[1]}" == library.parent.name:
                return f"{package} {found.version}"
    return None


def _package_folders(name: str) -> list[Path]:
    try:
        spec = importlib.util.find_spec(name)  # runs no code of the package itself
    except ModuleNotFoundError:
        return []
    return [Path(folder) for folder in (spec and spec.submodule_search_locations) or []]


def _toolkit_folders(plugin: Path | None) -> Iterator[Path]:
    for variable in ("CUDA_ROOT", "CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable])
    packages = _package_folders("nvidia")
    if plugin is not None:  # SITE/jax_plugins/xla_cuda12/xla_cuda_plugin.so
        packages.append(plugin.parent.parent.parent / "nvidia")
    for folder in packages:
        # Where the packages nvidia-cuda-nvcc-cu12 and nvidia-cuda-nvcc (CUDA 13) put them.
        yield from (folder / "cuda_nvcc", folder / "cu13")
    yield Path("/usr/local/cuda")
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        yield Path(nvcc).resolve().parent.parent


def toolkit(plugin: Path | None) -> Path | None:
    """Find a folder with bin/ptxas and libdevice, which XLA compiles GPU code with.

    Without a CUDA toolkit or nvcc's package it is made of the files that Triton brings.

    Returns:
        The folder; None if there is none.
    """
    for root in _toolkit_folders(plugin):
        if _is_toolkit(root):
            return root
    return _triton_toolkit()


def _is_toolkit(root: Path) -> bool:
    return (root / "bin/ptxas").exists() and (root / _LIBDEVICE).exists()


def _triton_toolkit() -> Path | None:
    """Link Triton's ptxas and libdevice into a folder laid out as a toolkit; None without them."""
    for package in _package_folders("triton"):
        folder = package / "backends/nvidia"
        files = {"bin/ptxas": folder / "bin/ptxas", _LIBDEVICE: folder / "lib/libdevice.10.bc"}
        if not all(source.exists() for source in files.values()):
            continue
        name = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
        with contextlib.suppress(OSError, RequestError):  # no folder can be written
            root = cache_folders.folder("cuda-toolkit") / name
            for target, source in files.items():
                (root / target).parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileExistsError):  # another process was first
                    (root / target).symlink_to(source)
            if _is_toolkit(root):
                return root
    return None


def preload_compiler(plugin: Path) -> None:
    """Load NVRTC, which cuDNN asks for by name and the plugin does not know where to find.

    A CUDA build of torch has loaded it before; then this changes nothing.
    """
    packages = [*_package_folders("nvidia"), plugin.parent.parent.parent / "nvidia"]
    for folder in packages:
        for library in ("cuda_nvrtc/lib/libnvrtc.so.12", "cu13/lib/libnvrtc.so.13"):
            if (folder / library).exists():
                ctypes.CDLL(str(folder / library))
                return


def has_cudnn_attention(compute_capability: str) -> bool:
    """Return whether cuDNN has attention in one kernel for such GPUs: from "8.0" (Ampere) on."""
    return float(compute_capability) >= 8.0
