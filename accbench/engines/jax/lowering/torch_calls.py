"""Functions of torch's called from inside XLA's programs, on the arrays where they lie.

On a CPU only. XLA calls a C function with a frame that says where arguments and results are: its
foreign function interface, whose stable layout is `xla/ffi/api/c_api.h` (version 0.1 and on; jaxlib
brings it). Here that function is Python's, by ctypes, so nothing needs to be compiled. A call
costs some 50 µs (docs/measured.md), and needs Python's lock.
"""

import contextlib
import ctypes as C
import json
import math
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import torch

TARGET = "accbench_torch"
"""The name that XLA's programs, and those that are kept on disk, call."""

_thread = threading.local()
# XLA calls from several threads, and each call may take all of torch's.
_alone = threading.Lock()
Function = Callable[..., None]
_functions: dict[str, Function] = {}

_EXTENSION_METADATA = 1
_INTERNAL_ERROR = 13  # XLA_FFI_Error_Code_INTERNAL
_MAJOR, _MINOR = 0, 1
# Tensors of one dtype and shape that are kept: memory is where it was in most steps.
_MOST_VIEWS = 1024


class _Extension(C.Structure):
    _fields_ = (("struct_size", C.c_size_t), ("type", C.c_int), ("next", C.c_void_p))


class _Version(C.Structure):
    _fields_ = (
        ("struct_size", C.c_size_t), ("extensions", C.c_void_p),
        ("major", C.c_int), ("minor", C.c_int),
    )  # fmt: skip


class _Metadata(C.Structure):
    _fields_ = (("struct_size", C.c_size_t), ("version", _Version), ("traits", C.c_uint32))


class _MetadataExtension(C.Structure):
    _fields_ = (("base", _Extension), ("metadata", C.POINTER(_Metadata)))


class _ErrorArguments(C.Structure):
    _fields_ = (
        ("struct_size", C.c_size_t), ("extensions", C.c_void_p),
        ("message", C.c_char_p), ("code", C.c_int),
    )  # fmt: skip


class _Api(C.Structure):
    _fields_ = (
        ("struct_size", C.c_size_t), ("extensions", C.c_void_p), ("version", _Version),
        ("internal", C.c_void_p),
        ("error_create", C.CFUNCTYPE(C.c_void_p, C.POINTER(_ErrorArguments))),
    )  # fmt: skip


class _Buffer(C.Structure):
    _fields_ = (
        ("struct_size", C.c_size_t), ("extensions", C.c_void_p), ("dtype", C.c_int),
        ("data", C.c_void_p), ("rank", C.c_int64), ("dims", C.POINTER(C.c_int64)),
    )  # fmt: skip


class _Span(C.Structure):
    _fields_ = (("data", C.c_void_p), ("size", C.c_size_t))


class _Buffers(C.Structure):
    _fields_ = (
        ("struct_size", C.c_size_t), ("extensions", C.c_void_p), ("size", C.c_int64),
        ("types", C.POINTER(C.c_int)), ("buffers", C.POINTER(C.POINTER(_Buffer))),
    )  # fmt: skip


class _Attributes(C.Structure):
    _fields_ = (
        ("struct_size", C.c_size_t), ("extensions", C.c_void_p), ("size", C.c_int64),
        ("types", C.POINTER(C.c_int)), ("names", C.POINTER(C.POINTER(_Span))),
        ("values", C.POINTER(C.POINTER(_Span))),
    )  # fmt: skip


class _Frame(C.Structure):
    _fields_ = (
        ("struct_size", C.c_size_t), ("extensions", C.POINTER(_Extension)),
        ("api", C.POINTER(_Api)), ("context", C.c_void_p), ("stage", C.c_int),
        ("arguments", _Buffers), ("results", _Buffers), ("attributes", _Attributes),
    )  # fmt: skip


def torch_call(function: Function) -> Callable[..., Any]:
    """Decorate a function on tensors, to be called on arrays in a jitted function.

    The function takes a list of tensors to read, a list of tensors to write its results into, and
    keyword arguments that JSON can hold. What it becomes takes the shapes and dtypes of the results
    (of each a `jax.ShapeDtypeStruct`), the arrays, and the same keyword arguments, and returns
    a list of arrays. With `in_place` so many results are the first so many arrays, in their
    memory, which holds these when the function is called.
    """
    name = f"{function.__module__}.{function.__name__}"
    _functions[name] = function

    def call(
        results: Sequence[jax.ShapeDtypeStruct], *arrays: Any, in_place: int = 0, **how: Any
    ) -> list[Any]:
        register()
        kinds = [[[str(a.dtype), a.shape] for a in given] for given in (arrays, results)]
        what = json.dumps([name, how, *kinds], sort_keys=True)
        aliases = {place: place for place in range(in_place)}
        made = jax.ffi.ffi_call(TARGET, tuple(results), input_output_aliases=aliases)
        return [*made(*arrays, what=what)]

    return call


def takes(*arrays: Any) -> bool:
    """Whether there is something in all of them, of a dtype that is handed over."""
    return all(a.size and str(a.dtype) in ("float32", "bfloat16", "float16") for a in arrays)


@cache
def register() -> None:
    """Before a program that calls is compiled, or read from disk."""
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(_handler), platform="cpu")


def _handle(frame_at: Any) -> int | None:
    """None is a call that went well; else XLA's error, which it then owns."""
    frame = frame_at.contents
    if frame.extensions and frame.extensions.contents.type == _EXTENSION_METADATA:
        extension = C.cast(frame.extensions, C.POINTER(_MetadataExtension)).contents
        version = extension.metadata.contents.version
        version.major, version.minor = _MAJOR, _MINOR
        return None
    try:
        if not hasattr(_thread, "is_ready"):
            # MKL takes as many threads as it likes, each time, in a thread that hasn't been told;
            # sums are then not the same to the last bit.
            torch.set_num_threads(torch.get_num_threads())
            _thread.is_ready = True
        span = frame.attributes.values[0].contents
        function, how, read, write = _call(C.string_at(span.data, span.size))
        one = _alone if torch.get_num_threads() > 1 else contextlib.nullcontext()
        with one, torch.inference_mode():
            function(_tensors(frame.arguments, read), _tensors(frame.results, write), **how)
    except BaseException as error:  # in a thread of XLA's nobody else would see it
        message = f"{type(error).__name__}: {error}".encode()
        given = _ErrorArguments(C.sizeof(_ErrorArguments), None, message, _INTERNAL_ERROR)
        made: int | None = frame.api.contents.error_create(C.byref(given))
        return made
    return None


_handler = C.CFUNCTYPE(C.c_void_p, C.POINTER(_Frame))(_handle)


class _Kind:
    """Tensors of one dtype and shape, where arrays lie."""

    def __init__(self, dtype: str, sizes: Sequence[int]) -> None:
        self.dtype, self.sizes = getattr(torch, dtype), list(sizes)
        self._memory = C.c_char * (self.dtype.itemsize * math.prod(sizes))
        self._views: dict[int, torch.Tensor] = {}

    def at(self, address: int) -> torch.Tensor:
        view = self._views.get(address)
        if view is None:
            if len(self._views) == _MOST_VIEWS:
                self._views.clear()
            memory = self._memory.from_address(address)
            view = torch.frombuffer(memory, dtype=self.dtype).view(self.sizes)
            self._views[address] = view
        return view


@cache
def _kind(dtype: str, sizes: tuple[int, ...]) -> _Kind:
    return _Kind(dtype, sizes)


@cache
def _call(what: bytes) -> tuple[Function, dict[str, Any], list[_Kind], list[_Kind]]:
    name, how, *kinds = json.loads(what)
    read, write = ([_kind(dtype, tuple(sizes)) for dtype, sizes in given] for given in kinds)
    return _functions[name], how, read, write


def _tensors(buffers: _Buffers, kinds: list[_Kind]) -> list[torch.Tensor]:
    at = buffers.buffers
    return [kind.at(at[place].contents.data) for place, kind in enumerate(kinds)]
