"""Compiling through a PJRT plugin for devices that are not here: PJRT's C API by ctypes.

The API is a table of functions to which later versions only append, each taking a pointer to a
struct that begins with its own size (xla/pjrt/c/pjrt_c_api.h); so a position in the table is good
for every version that is long enough. JAX's own ahead-of-time interface would do the same with
jax and jaxlib installed, whose versions would have to match the plugin's; this needs the plugin.
"""

import ctypes as C
import dataclasses
from pathlib import Path
from typing import Any

# Where each function's pointer stands in PJRT_Api, in bytes.
_ERROR_MESSAGE = 48
_INITIALIZE = 64
_SERIALIZE = 432
_CREATE_TOPOLOGY = 696
_COMPILE = 752
_MEMORY_STATS = 808


class CompilerError(Exception):
    """What the plugin answered instead of doing what it was asked to."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes a device, as the compiler has laid them out."""

    arguments: int
    results: int
    aliased: int
    """Of the results: those in the place of arguments."""
    temporaries: int
    code: int

    @property
    def peak(self) -> int:
        """What must be there while the program runs."""
        return self.arguments + self.results - self.aliased + self.temporaries


class Plugin:
    """A PJRT plugin's library, loaded and initialised once a process.

    Raises:
        CompilerError: it cannot be loaded, or is too old.
    """

    def __init__(self, library: Path) -> None:
        try:
            loaded = C.CDLL(str(library))
            loaded.GetPjrtApi.restype = C.c_void_p
            self._api: int = loaded.GetPjrtApi()
        except (OSError, AttributeError) as error:
            raise CompilerError(f"{library} is no PJRT plugin: {error}") from None
        size = C.c_size_t.from_address(self._api).value
        if size < _MEMORY_STATS + C.sizeof(C.c_void_p):
            raise CompilerError(f"{library} is too old: its PJRT API has {size} bytes")
        self._call(_INITIALIZE, _struct()())

    def compile(
        self, program: bytes, program_format: str, target_config: str, num_devices: int
    ) -> "Executable":
        """Compile for a node of `num_devices` such devices.

        Args:
            program: of all its devices' replicas as "hlo", an HloModuleProto; of all their
                partitions as "mlir", a portable artifact of StableHLO.
            target_config: a GpuTargetConfigProto as text.

        Raises:
            CompilerError: the compiler refused it.
        """
        values = {b"target_config": target_config.encode(), b"topology": b"1x1x%d" % num_devices}
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
        given = code(code=program, code_size=len(program), format=name, format_size=len(name))
        given.struct_size = C.sizeof(given)
        how = _compile_options(num_devices, are_partitions=program_format == "mlir")
        compile_ = _struct(topology=C.c_void_p, program=C.c_void_p, options=C.c_char_p,
                           options_size=C.c_size_t, client=C.c_void_p,
                           executable=C.c_void_p)  # fmt: skip
        executable = self._call(
            _COMPILE,
            compile_(
                topology=topology, program=C.addressof(given), options=how, options_size=len(how)
            ),  # fmt: skip
        ).executable
        return Executable(self, executable)

    def _call(self, place: int, arguments: Any) -> Any:
        arguments.struct_size = C.sizeof(arguments)
        error = self._function(place, C.c_void_p)(C.addressof(arguments))
        if error:
            message = _struct(error=C.c_void_p, text=C.c_void_p, size=C.c_size_t)(error=error)
            message.struct_size = C.sizeof(message)
            self._function(_ERROR_MESSAGE, None)(C.addressof(message))
            raise CompilerError(C.string_at(message.text, message.size).decode(errors="replace"))
        return arguments

    def _function(self, place: int, result: Any) -> Any:
        pointer = C.c_void_p.from_address(self._api + place).value
        assert pointer is not None
        return C.CFUNCTYPE(result, C.c_void_p)(pointer)


class Executable:
    """A compiled program."""

    def __init__(self, plugin: Plugin, pointer: int) -> None:
        self._plugin, self._pointer = plugin, pointer

    def memory(self) -> Memory:
        """What the compiler's buffer assignment came to."""
        stats = self._plugin._call(
            _MEMORY_STATS,
            _struct(executable=C.c_void_p, values=C.c_int64 * 12)(executable=self._pointer),
        ).values
        code, arguments, results, aliased, temporaries = stats[:5]
        return Memory(arguments, results, aliased, temporaries, code)

    def serialize(self) -> bytes:
        """As PJRT_Executable_DeserializeAndLoad takes it."""
        kept = self._plugin._call(
            _SERIALIZE,
            _struct(executable=C.c_void_p, data=C.c_void_p, size=C.c_size_t, handle=C.c_void_p,
                    deleter=C.c_void_p)(executable=self._pointer),
        )  # fmt: skip
        return C.string_at(kept.data, kept.size)


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
    """CompileOptionsProto (xla/pjrt/proto/compile_options.proto): part i on device i."""
    devices = [_varint(i) for i in range(num_devices)]
    # A list a partition, of a device a replica.
    lists = devices if are_partitions else [b"".join(devices)]
    num_replicas, num_partitions = num_devices // len(lists), len(lists)
    computations = b"".join(_bytes_field(3, _bytes_field(1, ids)) for ids in lists)
    assignment = _number(1, num_replicas) + _number(2, num_partitions) + computations
    build = _number(1, -1) + _number(4, num_replicas) + _number(5, num_partitions)
    # Field 12: results may stay divided among partitions.
    build += _number(6, int(are_partitions)) + _bytes_field(9, assignment) + _bytes_field(12, b"\1")
    return _bytes_field(3, build)


def _varint(value: int) -> bytes:
    value %= 2**64
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes_field(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content
