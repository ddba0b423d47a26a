"""Ahead-of-time compilation through a PJRT plug-in for absent devices: its C API by ctypes.

The API is a table of functions to which later versions only append. Each function takes a pointer
to a struct that begins with its own size (xla/pjrt/c/pjrt_c_api.h), so that a position in the
table is valid for every version whose table is long enough. JAX's ahead-of-time interface could do
the same, but needs jax and jaxlib in versions that match the plug-in's; this needs only the
plug-in.
"""

import ctypes as C
import dataclasses
from pathlib import Path
from typing import Any

# Offset of each function's pointer in PJRT_Api, in bytes.
_ERROR_MESSAGE = 48
_INITIALIZE = 64
_SERIALIZE = 432
_CREATE_TOPOLOGY = 696
_COMPILE = 752
_MEMORY_STATS = 808


class CompilerError(Exception):
    """An error that the plug-in reports."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory per device in bytes, as the compiler assigned it."""

    arguments: int
    results: int
    aliased: int
    """The part of the results that reuses the arguments' memory."""
    temporaries: int
    code: int

    @property
    def peak(self) -> int:
        """Memory in bytes that the program needs while it runs."""
        return self.arguments + self.results - self.aliased + self.temporaries


class Plugin:
    """A PJRT plug-in's library, loaded and initialised once per process.

    Raises:
        CompilerError: the library cannot be loaded, or is too old.
    """

    def __init__(self, library: Path) -> None:
        try:
            loaded = C.CDLL(str(library))
            loaded.GetPjrtApi.restype = C.c_void_p
            self._api: int = loaded.GetPjrtApi()
        except (OSError, AttributeError) as error:
            raise CompilerError(f"{library} is not a PJRT plug-in: {error}") from None
        size = C.c_size_t.from_address(self._api).value
        if size < _MEMORY_STATS + C.sizeof(C.c_void_p):
            raise CompilerError(f"{library} is too old: its PJRT API has {size} bytes")
        self._call(_INITIALIZE, _struct()())

    def compile(
        self, program: bytes, program_format: str, target_config: str, nodes: tuple[int, int]
    ) -> "Executable":
        """Compile a program for equal nodes of equal devices.

        Args:
            program: the serialised program.
            program_format: "hlo" for an HloModuleProto with a replica per device, "mlir" for a
                portable StableHLO artifact with a partition per device.
            target_config: a GpuTargetConfigProto as text.
            nodes: number of nodes, and devices of each.

        Raises:
            CompilerError: the compiler refused the program.
        """
        num_nodes, num_devices = nodes[0], nodes[0] * nodes[1]
        values = {
            b"target_config": target_config.encode(),
            b"topology": b"1x%dx%d" % (num_nodes, nodes[1]),
        }
        options = (_NamedValue * len(values))(
            *(
                _NamedValue(C.sizeof(_NamedValue), None, key, len(key), 0, value, len(value))
                for key, value in values.items()
            )
        )
        create = _struct(name=C.c_void_p, name_size=C.c_size_t, options=C.c_void_p,
                         num_options=C.c_size_t, topology=C.c_void_p)  # fmt: skip
        topology = self._call(
            _CREATE_TOPOLOGY, create(options=C.addressof(options), num_options=len(options))
        ).topology
        code = _struct(code=C.c_char_p, code_size=C.c_size_t, format=C.c_char_p,
                       format_size=C.c_size_t)  # fmt: skip
        name = program_format.encode()
        source = code(code=program, code_size=len(program), format=name, format_size=len(name))
        source.struct_size = C.sizeof(source)
        compile_options = _compile_options(num_devices, are_partitions=program_format == "mlir")
        compile_ = _struct(topology=C.c_void_p, program=C.c_void_p, options=C.c_char_p,
                           options_size=C.c_size_t, client=C.c_void_p,
                           executable=C.c_void_p)  # fmt: skip
        executable = self._call(
            _COMPILE,
            compile_(
                topology=topology,
                program=C.addressof(source),
                options=compile_options,
                options_size=len(compile_options),
            ),  # fmt: skip
        ).executable
        return Executable(self, executable)

    def _call(self, offset: int, arguments: Any) -> Any:
        arguments.struct_size = C.sizeof(arguments)
        error = self._function(offset, C.c_void_p)(C.addressof(arguments))
        if error:
            message = _struct(error=C.c_void_p, text=C.c_void_p, size=C.c_size_t)(error=error)
            message.struct_size = C.sizeof(message)
            self._function(_ERROR_MESSAGE, None)(C.addressof(message))
            raise CompilerError(C.string_at(message.text, message.size).decode(errors="replace"))
        return arguments

    def _function(self, offset: int, result: Any) -> Any:
        pointer = C.c_void_p.from_address(self._api + offset).value
        assert pointer is not None
        return C.CFUNCTYPE(result, C.c_void_p)(pointer)


class Executable:
    """A compiled program."""

    def __init__(self, plugin: Plugin, pointer: int) -> None:
        self._plugin, self._pointer = plugin, pointer

    def memory(self) -> Memory:
        """Return the memory that the compiler's buffer assignment needs."""
        stats = self._plugin._call(
            _MEMORY_STATS,
            _struct(executable=C.c_void_p, values=C.c_int64 * 12)(executable=self._pointer),
        ).values
        code, arguments, results, aliased, temporaries = stats[:5]
        return Memory(arguments, results, aliased, temporaries, code)

    def serialize(self) -> bytes:
        """Return the executable as bytes that PJRT_Executable_DeserializeAndLoad accepts."""
        serialized = self._plugin._call(
            _SERIALIZE,
            _struct(executable=C.c_void_p, data=C.c_void_p, size=C.c_size_t, handle=C.c_void_p,
                    deleter=C.c_void_p)(executable=self._pointer),
        )  # fmt: skip
        return C.string_at(serialized.data, serialized.size)


class _NamedValue(C.Structure):
    # PJRT_NamedValue; type 0 is a string.
    _fields_ = [
        ("struct_size", C.c_size_t), ("extension", C.c_void_p), ("name", C.c_char_p),
        ("name_size", C.c_size_t), ("type", C.c_int), ("value", C.c_char_p),
        ("value_size", C.c_size_t),
    ]  # fmt: skip


def _struct(**fields: Any) -> Any:
    head = [("struct_size", C.c_size_t), ("extension", C.c_void_p)]
    return type("Arguments", (C.Structure,), {"_fields_": [*head, *fields.items()]})


def _compile_options(num_devices: int, are_partitions: bool) -> bytes:
    """Build a CompileOptionsProto that puts replica or partition i on device i.

    Source: xla/pjrt/proto/compile_options.proto.
    """
    devices = [_varint(i) for i in range(num_devices)]
    # One list of devices per partition, with one device per replica.
    lists = devices if are_partitions else [b"".join(devices)]
    num_replicas, num_partitions = num_devices // len(lists), len(lists)
    computations = b"".join(_bytes_field(3, _bytes_field(1, ids)) for ids in lists)
    assignment = _int_field(1, num_replicas) + _int_field(2, num_partitions) + computations
    build = _int_field(1, -1) + _int_field(4, num_replicas) + _int_field(5, num_partitions)
    # Field 12: results may stay sharded among partitions.
    build += (
        _int_field(6, int(are_partitions)) + _bytes_field(9, assignment) + _bytes_field(12, b"\1")
    )
    return _bytes_field(3, build)


def _varint(value: int) -> bytes:
    value %= 2**64
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _int_field(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes_field(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content
