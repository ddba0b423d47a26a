"""torch functions called from inside XLA's programs, on the memory of the arrays.

On a CPU only. XLA calls a C function with a frame that tells where arguments and results are: its
foreign function interface, whose stable layout is `xla/ffi/api/c_api.h` (version 0.1 and on; jaxlib
brings it). Here that function is Python's, by ctypes, so nothing needs to be compiled. A call
costs some 50 µs (docs/measured.md), and holds Python's lock.
"""

import contextlib
import ctypes as C
import importlib
import json
import math
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import torch

TARGET = "accbench_torch"
"""The custom call's name in XLA's programs, those on disk too."""

_thread = threading.local()
# XLA calls from several threads, and each call may use all of torch's threads.
_torch_lock = threading.Lock()
Function = Callable[..., None]
_functions: dict[str, Function] = {}

_EXTENSION_METADATA = 1
_INTERNAL_ERROR = 13  # XLA_FFI_Error_Code_INTERNAL
_MAJOR, _MINOR = 0, 1
# Tensors kept of one dtype and shape: in most steps memory is where it was before.
_MAX_VIEWS = 1024


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
    """Decorate a function on tensors, so that a jitted function can call it on arrays.

    The function takes a list of tensors to read, a list of tensors to write its results into, and
    keyword arguments that JSON can hold. The decorated one takes the shapes and dtypes of the
    results (a `jax.ShapeDtypeStruct` each), the arrays, and the same keyword arguments, and returns
    a list of arrays. With `in_place`, that many results share the memory of the first arrays, which
    holds these arrays' values when the function is called.
    """
    name = f"{function.__module__}.{function.__name__}"
    _functions[name] = function

    def call(
        results: Sequence[jax.ShapeDtypeStruct], *arrays: Any, in_place: int = 0, **arguments: Any
    ) -> list[Any]:
        register()
        types = [[[str(a.dtype), a.shape] for a in group] for group in (arrays, results)]
        call_json = json.dumps([name, arguments, *types], sort_keys=True)
        aliases = {index: index for index in range(in_place)}
        ffi_call = jax.ffi.ffi_call(TARGET, tuple(results), input_output_aliases=aliases)
        return [*ffi_call(*arrays, what=call_json)]

    return call


def supports(*arrays: Any) -> bool:
    """Return whether every array has elements, and a dtype that can be passed to torch."""
    return all(a.size and str(a.dtype) in ("float32", "bfloat16", "float16") for a in arrays)


@cache
def register() -> None:
    """Register the call with XLA, before a program with it is compiled or read from disk."""
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(_handler), platform="cpu")


def _handle(frame_at: Any) -> int | None:
    """Run a call; None where it succeeded, else an error of XLA's, which XLA then owns."""
    frame = frame_at.contents
    if frame.extensions and frame.extensions.contents.type == _EXTENSION_METADATA:
        extension = C.cast(frame.extensions, C.POINTER(_MetadataExtension)).contents
        version = extension.metadata.contents.version
        version.major, version.minor = _MAJOR, _MINOR
        return None
    try:
        if not hasattr(_thread, "is_ready"):
            # In a new thread MKL chooses the number of threads at each call, and sums then differ
            # in the last bits.
            torch.set_num_threads(torch.get_num_threads())
            _thread.is_ready = True
        span = frame.attributes.values[0].contents
        function, arguments, read, write = _parse_call(C.string_at(span.data, span.size))
        lock = _torch_lock if torch.get_num_threads() > 1 else contextlib.nullcontext()
        with lock, torch.inference_mode():
            function(_tensors(frame.arguments, read), _tensors(frame.results, write), **arguments)
    except BaseException as error:  # nobody else would see it in a thread of XLA's
        message = f"{type(error).__name__}: {error}".encode()
        error_arguments = _ErrorArguments(C.sizeof(_ErrorArguments), None, message, _INTERNAL_ERROR)
        error_pointer: int | None = frame.api.contents.error_create(C.byref(error_arguments))
        return error_pointer
    return None


_handler = C.CFUNCTYPE(C.c_void_p, C.POINTER(_Frame))(_handle)


class _ViewFactory:
    """Makes tensors of one dtype and shape at given addresses."""

    def __init__(self, dtype: str, sizes: Sequence[int]) -> None:
        self.dtype, self.sizes = getattr(torch, dtype), list(sizes)
        self._memory = C.c_char * (self.dtype.itemsize * math.prod(sizes))
        self._views: dict[int, torch.Tensor] = {}

    def at(self, address: int) -> torch.Tensor:
        view = self._views.get(address)
        if view is None:
            if len(self._views) == _MAX_VIEWS:
                self._views.clear()
            memory = self._memory.from_address(address)
            view = torch.frombuffer(memory, dtype=self.dtype).view(self.sizes)
            self._views[address] = view
        return view


@cache
def _views_of(dtype: str, sizes: tuple[int, ...]) -> _ViewFactory:
    return _ViewFactory(dtype, sizes)


def _function_of(name: str) -> Function:
    """Return the decorated function of this name; its module is imported if need be.

    A program from disk may call a function whose module only the process that traced it imported.
    """
    if name not in _functions and name.startswith("accbench."):
        importlib.import_module(name.rpartition(".")[0])
    return _functions[name]


@cache
def _parse_call(
    what: bytes,
) -> tuple[Function, dict[str, Any], list[_ViewFactory], list[_ViewFactory]]:
    name, arguments, *types = json.loads(what)
    read, write = ([_views_of(dtype, tuple(sizes)) for dtype, sizes in group] for group in types)
    return _function_of(name), arguments, read, write


def _tensors(buffers: _Buffers, factories: list[_ViewFactory]) -> list[torch.Tensor]:
    pointers = buffers.buffers
    return [views.at(pointers[index].contents.data) for index, views in enumerate(factories)]
