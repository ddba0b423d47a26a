"""A safetensors file written tensor by tensor, of tensors that several ranks have rows of.

safetensors' own writer wants all tensors at once, and no rank has them. The format: eight bytes
with the header's length, a JSON header of types, shapes and places, and the tensors' bytes
(https://github.com/huggingface/safetensors#format).
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from accbench.distributed import complex_numbers
from accbench.distributed.parameter_shards import ShardedTensor

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip


def in_order(tensors: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return tensors in the order of the file, in which all ranks gather them.

    Larger types come first, which keeps each tensor aligned.
    """
    return sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))


def gather_rest(tensors: Mapping[str, Any]) -> None:
    """Take part in the gathering of all tensors that have not been gathered here yet."""
    for _, tensor in in_order(tensors):
        if isinstance(tensor, ShardedTensor) and not tensor.is_gathered:
            tensor.gather()


def write(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write tensors and `ShardedTensor`s, one of which is in memory at a time.

    Complex ones are written as `complex_numbers.as_real` encodes them.

    Raises:
        OSError: the file cannot be written; the other ranks still wait for `gather_rest`.
        ValueError: the format has no such type.
    """
    with path.open("wb") as file:
        file.write(_header(tensors))
        for _, tensor in in_order(tensors):
            whole = tensor.gather() if isinstance(tensor, ShardedTensor) else tensor
            assert whole is not None  # this is rank 0
            file.write(memoryview(_bytes_of(whole)))


def _header(tensors: Mapping[str, Any]) -> bytes:
    begin, entries = 0, {}
    for name, num_bytes in _sizes(tensors):
        key, shape, dtype = complex_numbers.stored_as(name, tensors[name])
        if dtype not in _DTYPES:
            raise ValueError(f"safetensors has no type {dtype}, which {name} has")
        entries[key] = {
            "dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [begin, begin + num_bytes],
        }  # fmt: skip
        begin += num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _sizes(tensors: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, tensor in in_order(tensors):
        yield name, math.prod(tensor.shape) * tensor.dtype.itemsize


def _bytes_of(tensor: torch.Tensor) -> Any:
    real = complex_numbers.real(tensor.detach().cpu())
    return real.contiguous().reshape(-1).view(torch.uint8).numpy()
