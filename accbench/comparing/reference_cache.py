"""Float64's training and plain ddp's passes, kept for later comparisons of the same thing.

An entry's name is a digest of all that its contents follow from: flags, the weights at the start,
the batches, accbench's source, the installed packages, the processor, and the environment
variables that libraries read. What cannot be known is not kept: models of the user's own. An entry
holds safetensors and JSON, with a checksum of each of the reference's files; the oldest go when
all are larger than `MAX_BYTES`.
"""

import contextlib
import hashlib
import json
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Iterable
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

import accbench
from accbench import config
from accbench.config import TaskConfig
from accbench.data import nested
from accbench.engines import Batch
from accbench.errors import RequestError
from accbench.recording import provenance, records, run_folder
from accbench.system import cache_folders

MAX_BYTES = 4 << 30
"""Size of all entries together."""
MAX_BATCH_BYTES = 256 << 20
"""Size of a reference's batches, from which on they are not read before the training."""
KEPT = "kept"
"""Phase of the record's line that tells that an earlier comparison made the pass."""
_MANIFEST, _FLOORS = "manifest.json", "floors"
# Packages whose code is known by their version, and accbench, whose source is in the digest.
_KNOWN_PACKAGES = ("accbench", "torch", "torchvision", "timm")
_KNOWN_MODELS = ("", "torchvision", "timm")
"""What stands before the colon in `--model`: nothing of accbench's own models."""
# Prefixes of environment variables that change what numbers come out.
_VARIABLES = (
    "ATEN_", "BLIS_", "CUBLAS_", "CUDA_", "CUDNN_", "DNNL_", "GOMP_", "KMP_", "LD_", "MKL_",
    "NCCL_", "NVIDIA_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH",
)  # fmt: skip
# Of these, what names a run's files, and caches of a compiler that these passes do without.
_NAMES_OF_A_RUN = ("TORCHELASTIC_", "TORCHINDUCTOR_")


def key(
    task: TaskConfig, num_shards: int, drops: bool, net: nn.Module, spec: Any,
    batches: Iterable[Batch],
) -> str | None:  # fmt: skip
    """Return the digest of all that a reference follows from; None if that is not known.

    It is not known of accelerators, whose libraries choose their kernels by themselves.

    Args:
        task: the reference's task.
        num_shards: the number of ranks that engines will train with.
        drops: whether dropout drops where no batch is shared.
        net: the model before its first step.
        spec: the model's spec.
        batches: the batches of all shards and steps.
    """
    if task.device != "cpu" or task.model.rpartition(":")[0] not in _KNOWN_MODELS:
        return None
    classes = {type(spec), *(type(module) for module in net.modules())}
    if any(kind.__module__.partition(".")[0] not in _KNOWN_PACKAGES for kind in classes):
        return None
    digest = hashlib.sha256()
    _add(digest, ["reference", _setting(task), num_shards, drops, _surroundings(), _structure(net)])
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        _add_tensor(digest, name, tensor.detach())
    for batch in batches:
        for number, tensor in enumerate(nested.tensors_of(batch)):
            _add_tensor(digest, str(number), tensor)
    return digest.hexdigest()


def _setting(task: TaskConfig) -> dict[str, Any]:
    values = config.as_mapping(task)
    values.pop("output_dir", None)
    return values


def _structure(net: nn.Module) -> list[Any]:
    return [
        [name, f"{type(module).__module__}.{type(module).__qualname__}", repr(module)]
        for name, module in net.named_modules()
    ]


def _add(digest: Any, values: Any) -> None:
    digest.update(json.dumps(values, sort_keys=True, default=str).encode() + b"\n")


def _add_tensor(digest: Any, name: str, tensor: torch.Tensor) -> None:
    _add(digest, [name, str(tensor.dtype), list(tensor.shape)])
    digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def _surroundings() -> list[Any]:
    """Return the facts of machine, packages and source that numbers depend on."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_VARIABLES) and not name.startswith(_NAMES_OF_A_RUN)
    }
    return [
        _source(), _packages(), torch.__config__.show(), platform.platform(), socket.gethostname(),
        provenance.cpu_name(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(),
        variables,
    ]  # fmt: skip


@lru_cache
def _source() -> str:
    """Return a digest of accbench's source files."""
    folder = Path(accbench.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        _add(digest, [str(path.relative_to(folder)), path.read_text(encoding="utf-8")])
    return digest.hexdigest()


@lru_cache
def _packages() -> list[str]:
    return sorted(f"{found.name}=={found.version}" for found in metadata.distributions())


def _entry(name: str) -> Path:
    return cache_folders.folder("references") / name


def fetch(name: str, folder: Path) -> bool:
    """Put a kept reference into `folder`, and return whether there was one that is whole."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError, ValueError, RequestError):
        entry = _entry(name)
        checksums = json.loads((entry / _MANIFEST).read_text(encoding="utf-8"))
        folder.mkdir(parents=True)
        for file in checksums:
            _link(entry / file, folder / file)
        if {file: _checksum(folder / file) for file in checksums} == checksums:
            os.utime(entry)  # the least recently used go first
            return True
        shutil.rmtree(entry, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    return False


def store(name: str, folder: Path) -> None:
    """Keep a reference, unless there is no room for it or nothing can be written."""
    size = sum(path.stat().st_size for path in folder.iterdir())
    with contextlib.suppress(OSError, RequestError):
        entry = _entry(name)
        entry.parent.mkdir(parents=True, exist_ok=True)
        if 2 * size > min(MAX_BYTES, shutil.disk_usage(entry.parent).free):
            return
        make_room(entry.parent, size)
        with tempfile.TemporaryDirectory(dir=entry.parent) as new:
            checksums = {}
            for path in folder.iterdir():
                shutil.copyfile(path, Path(new) / path.name)
                checksums[path.name] = _checksum(path)
            text = json.dumps(checksums)
            (Path(new) / _MANIFEST).write_text(text, encoding="utf-8")
            os.rename(new, entry)  # fails where another comparison was faster
            Path(new).mkdir()  # which the block removes


def make_room(folder: Path, size: int) -> None:
    """Remove the entries that were used least recently, until there is room for `size` bytes."""
    entries = sorted((p for p in folder.iterdir() if p.is_dir()), key=lambda p: p.stat().st_mtime)
    sizes = [sum(f.stat().st_size for f in entry.rglob("*") if f.is_file()) for entry in entries]
    for entry, entry_size in zip(entries, sizes, strict=True):
        if sum(sizes) + size <= MAX_BYTES:
            return
        shutil.rmtree(entry, ignore_errors=True)
        sizes[sizes.index(entry_size)] = 0


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # on another file system
        shutil.copyfile(source, target)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


class FloorEntry:
    """The kept record of one pass of plain ddp beside a kept reference."""

    def __init__(self, reference: str, task: TaskConfig) -> None:
        digest = hashlib.sha256()
        _add(digest, ["floor", reference, _setting(task), _surroundings()])
        self.task, self.run_dir = task, task.run_dir
        self.file = _entry(reference) / _FLOORS / f"{digest.hexdigest()}.jsonl"

    def fetch(self) -> bool:
        """Put the record into the run's folder as a run leaves it; return whether there was one."""
        try:
            kept = records.read(self.file)
        except RequestError:
            return False
        self.run_dir.mkdir(parents=True, exist_ok=True)
        for record in (*kept[:1], records.NumericsRecord(KEPT, 0, {}), *kept[1:]):
            records.append(self.run_dir / config.RECORDS_FILE, record)
        run_folder.write(self.task)
        return True

    def store(self) -> None:
        """Keep the record of the run, if its reference is kept."""
        with contextlib.suppress(OSError):
            if not self.file.parents[1].exists():
                return
            self.file.parent.mkdir(exist_ok=True)
            new = self.file.with_suffix(f".{os.getpid()}")
            shutil.copyfile(self.run_dir / config.RECORDS_FILE, new)
            os.rename(new, self.file)
