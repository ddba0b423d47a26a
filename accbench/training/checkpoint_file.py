"""One checkpoint on disk: a folder of tensors.safetensors and checkpoint.json.

Tensors are named `model/NAME`, `optimizer/KEY/NAME` and `rng/RANK/KEY`, where NAME is the
parameter's or buffer's name, and `extra/NUMBER` for the model's extra state. Complex tensors are
stored as real ones with a last axis of 2 and `:complex` appended to the name. The JSON has
everything else, the size and SHA-256 of the tensors' file, and its own SHA-256. It contains no
code: reading a checkpoint runs none.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from accbench.distributed import complex_numbers
from accbench.distributed.parameter_shards import ShardedTensor
from accbench.engines.common import extra_state
from accbench.engines.common.training_state import Tensors, TrainingState
from accbench.training import streamed_tensors

FORMAT = 1
JSON_FILE, TENSORS_FILE = "checkpoint.json", "tensors.safetensors"
_EXTRA = "extra"
# Suffix of the hidden name of a checkpoint that a newer one of the same step replaces.
REPLACED = ".old"
_CHUNK_BYTES = 1 << 22


class DamagedError(Exception):
    """A folder holds no complete checkpoint; the message says why."""


@dataclasses.dataclass(frozen=True)
class CheckpointFacts:
    """What a checkpoint holds besides tensors. Counts cover the whole run."""

    step: int
    """Optimizer steps done."""
    epoch: int
    """The epoch to go on with, from 0."""
    loader: dict[str, Any] | None
    """The loader's state in that epoch; None at its beginning."""
    world_size: int
    engine: str
    model: str
    seed: int
    num_classes: int
    scaler: dict[str, float]
    top1: float | None = None
    """Top-1 accuracy of the evaluation at this point, 0..1; None without one."""
    loss: float | None = None
    """Loss of the same evaluation."""
    optimizer: str = "adamw"
    image_size: int = 224
    num_samples: int | None = None
    """Samples that all ranks have trained on; None in checkpoints from before it was stored."""
    num_token_ranks: int | None = None
    """Ranks with tokens of their own; None in checkpoints from before it was stored."""
    num_pp_ranks: int = 1
    """Ranks that share each model as stages of a pipeline."""
    epochs_trained: float | None = None
    """Epochs that the learning rate's schedule has gone through, of steps as long as they were;
    None in checkpoints from before it was stored."""
    data: str | None = None
    """Name of the data source; None in checkpoints from before it was stored."""
    num_train_samples: int | None = None
    """Samples of an epoch's data; None where the loader's state does not hold it."""
    format: int = FORMAT


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """All that a run needs to go on; its tensors are on the host."""

    facts: CheckpointFacts
    state: TrainingState
    rng: tuple[Tensors, ...]
    """For each rank: name -> state of a random number generator."""


def write(folder: Path, checkpoint: Checkpoint) -> int:
    """Write a checkpoint's folder atomically and durably, and return its number of bytes.

    Raises:
        OSError: it cannot be written; what was begun has been removed.
    """
    begun = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    shutil.rmtree(begun, ignore_errors=True)
    try:
        begun.mkdir(parents=True)
        num_bytes = _write_files(begun, checkpoint)
        replaced = folder.with_name(f".{folder.name}.{os.getpid()}{REPLACED}")
        with contextlib.suppress(FileNotFoundError):
            folder.rename(replaced)  # one of the same step
        begun.rename(folder)
        _flush(folder.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(begun, ignore_errors=True)
        if isinstance(error, SafetensorError):  # safetensors reports a full disk by this
            raise OSError(0, str(error), str(folder)) from None
        raise
    return num_bytes


def _write_files(folder: Path, checkpoint: Checkpoint) -> int:
    tensors = folder / TENSORS_FILE
    extra: list[torch.Tensor] = []
    packed = {k: extra_state.pack(v, extra) for k, v in (checkpoint.state.extra or {}).items()}
    flat = _flat(checkpoint, extra)
    if any(isinstance(tensor, ShardedTensor) for tensor in flat.values()):
        streamed_tensors.write(tensors, flat)
    else:
        save_file(complex_numbers.as_real(flat), tensors)
    _flush(tensors)
    content = {
        **dataclasses.asdict(checkpoint.facts),
        _EXTRA: packed,
        "tensors": {"bytes": tensors.stat().st_size, "sha256": _sha256_of_file(tensors)},
    }
    text = json.dumps({**content, "sha256": _sha256_of(content)}, indent=1)
    path = folder / JSON_FILE
    path.write_text(text, encoding="utf-8")
    _flush(path)
    _flush(folder)
    return int(content["tensors"]["bytes"]) + len(text)


def _flat(checkpoint: Checkpoint, extra: list[torch.Tensor]) -> Tensors:
    tensors = {f"model/{name}": tensor for name, tensor in checkpoint.state.model.items()}
    for name, state in checkpoint.state.optimizer.items():
        tensors.update({f"optimizer/{key}/{name}": tensor for key, tensor in state.items()})
    for rank, states in enumerate(checkpoint.rng):
        tensors.update({f"rng/{rank}/{key}": tensor for key, tensor in states.items()})
    tensors.update({f"{_EXTRA}/{number}": tensor for number, tensor in enumerate(extra)})
    return {
        name: tensor if isinstance(tensor, ShardedTensor) else tensor.contiguous()
        for name, tensor in tensors.items()
    }


def gather_rest(checkpoint: Checkpoint) -> None:
    """Take part in gathering what of a checkpoint this rank has not gathered yet."""
    streamed_tensors.gather_rest(_flat(checkpoint, []))


class FileTensor:
    """A tensor in a safetensors file, of which slices are read as they are needed."""

    def __init__(self, file: Any, key: str) -> None:
        self._file, self._key = file, key
        shape = tuple(file.get_slice(key).get_shape())
        self.shape = shape[:-1] if complex_numbers.is_marked(key) else shape

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor:
        return complex_numbers.decoded(self._key, self._file.get_slice(self._key)[index])

    def read(self) -> torch.Tensor:
        """Read all of it."""
        return complex_numbers.decoded(self._key, self._file.get_tensor(self._key))


def _flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_facts(folder: Path) -> CheckpointFacts:
    """Read what the JSON says, without the tensors.

    Raises:
        DamagedError: it is missing, damaged or of a newer format.
    """
    return _facts(_read_json(folder))


def verify(folder: Path) -> CheckpointFacts:
    """Read all of a checkpoint once, and compare it with its checksums.

    Raises:
        DamagedError: something is missing, damaged or of a newer format.
    """
    content = _read_json(folder)
    facts, tensors = _facts(content), folder / TENSORS_FILE
    try:
        num_bytes, expected = tensors.stat().st_size, content["tensors"]
        if num_bytes != expected["bytes"]:
            raise DamagedError(f"{tensors} has {num_bytes} bytes of {expected['bytes']}")
        if _sha256_of_file(tensors) != expected["sha256"]:
            raise DamagedError(f"{tensors} is damaged: its checksum is another")
    except OSError as error:
        raise DamagedError(f"cannot read {tensors}: {error.strerror}") from None
    return facts


def read(folder: Path, by_rows: bool = False) -> Checkpoint:
    """Read a checkpoint that `verify` has found complete.

    Args:
        folder: the checkpoint's.
        by_rows: leave the model's and the optimizer's tensors in the file, as `FileTensor`s.

    Raises:
        DamagedError: it is not complete, or no longer.
    """
    content = _read_json(folder)
    facts = _facts(content)
    model: Tensors = {}
    extra: dict[int, torch.Tensor] = {}
    optimizer: dict[str, Tensors] = {}
    rng: dict[int, Tensors] = {}
    try:
        tensors = _open(folder / TENSORS_FILE, by_rows)
        for key, tensor in tensors.items():
            kind, rest = key.split("/", 1)
            if kind == "model":
                model[rest] = tensor
                continue
            if kind == _EXTRA:
                extra[int(rest)] = tensor
                continue
            group, name = rest.split("/", 1)
            if kind == "optimizer":
                optimizer.setdefault(name, {})[group] = tensor
            else:
                rng.setdefault(int(group), {})[name] = tensor
        extra_state_dict = _extra_of(content, extra)
    except (OSError, SafetensorError, ValueError, LookupError) as error:
        raise DamagedError(f"cannot read {folder / TENSORS_FILE}: {error}") from None
    state = TrainingState(model, optimizer, facts.scaler, extra_state_dict)
    return Checkpoint(facts, state, tuple(rng[rank] for rank in sorted(rng)))


def _open(path: Path, by_rows: bool) -> dict[str, Any]:
    if not by_rows:
        return {**complex_numbers.as_complex(load_file(path))}
    file = safe_open(path, "pt")
    keys, of_shards = [*file.keys()], ("model/", "optimizer/")
    rest = {key: file.get_tensor(key) for key in keys if not key.startswith(of_shards)}
    in_file = {
        complex_numbers.without_mark(key): FileTensor(file, key)
        for key in keys
        if key.startswith(of_shards)
    }
    return {**complex_numbers.as_complex(rest), **in_file}


def _extra_of(content: dict[str, Any], tensors: dict[int, torch.Tensor]) -> dict[str, Any] | None:
    """Return the model's extra state; None for a checkpoint from before it was stored."""
    if _EXTRA not in content:
        return None
    in_order = [tensors[number] for number in range(len(tensors))]
    return {key: extra_state.unpack(value, in_order) for key, value in content[_EXTRA].items()}


def _read_json(folder: Path) -> dict[str, Any]:
    path = folder / JSON_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        expected = content.pop("sha256")
    except OSError as error:
        raise DamagedError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        raise DamagedError(f"{path} is damaged") from None
    if _sha256_of(content) != expected:
        raise DamagedError(f"{path} is damaged: its checksum is another")
    if content.get("format") != FORMAT:
        raise DamagedError(f"{path} has format {content.get('format')}, this version {FORMAT}")
    return dict(content)


def _facts(content: dict[str, Any]) -> CheckpointFacts:
    names = {field.name for field in dataclasses.fields(CheckpointFacts)}
    return CheckpointFacts(**{name: value for name, value in content.items() if name in names})


def _sha256_of(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _sha256_of_file(path: Path) -> str:
    digest, buffer = hashlib.sha256(), bytearray(_CHUNK_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(view[:size])
    return digest.hexdigest()


def remove(folder: Path) -> None:
    """Remove a checkpoint; an incomplete removal leaves nothing under its valid name."""
    going = folder.with_name(f".{folder.name}.{os.getpid()}.gone")
    with contextlib.suppress(OSError):
        folder.rename(going)
        shutil.rmtree(going, ignore_errors=True)
