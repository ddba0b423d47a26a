"""Conversions between torch's tensors on the host and JAX's arrays."""

import weakref
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch._subclasses.fake_tensor import FakeTensor

from accbench.distributed import complex_numbers
from accbench.errors import RequestError

# XLA on the CPU reads arrays only at addresses that this divides.
_ALIGNED_BYTES = 64
_INT32 = torch.iinfo(torch.int32)
_FLOAT8 = {
    torch.float8_e4m3fn: jnp.float8_e4m3fn,
    torch.float8_e5m2: jnp.float8_e5m2,
    torch.float8_e4m3fnuz: jnp.float8_e4m3fnuz,
    torch.float8_e5m2fnuz: jnp.float8_e5m2fnuz,
}


def from_torch(tensor: torch.Tensor, device: jax.Device) -> jax.Array:
    """Return the tensor as an array that is only read: in the tensor's own memory, if possible.

    Where JAX has no int64 (`jax_enable_x64`), int64 becomes int32. Of a fake tensor the result is a
    `ShapeDtypeStruct`.

    Raises:
        RequestError: a number is too large for that.
    """
    if isinstance(tensor, FakeTensor):
        return _described(tensor)
    tensor = _to_jax_dtype(tensor.detach().resolve_conj().resolve_neg())
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    # torch 2.8's DLPack gives dimensions of one element the stride 1, and so such an array another
    # layout than a step's results have.
    if device.platform != "cpu" or (1 in tensor.shape and tensor.dim() > 1):
        return _sent(tensor, device)
    if tensor.data_ptr() % _ALIGNED_BYTES:
        tensor = tensor.clone()
    # The array holds the tensor's DLPack capsule, which keeps its memory for later readers.
    return _from_dlpack(tensor)


def copy_from_torch(tensor: torch.Tensor, device: jax.Device) -> jax.Array:
    """Copy the tensor to an array that a step may overwrite; waits for the copy."""
    array = from_torch(tensor, device)
    if isinstance(array, jax.ShapeDtypeStruct):
        return array
    if device.platform == "cpu":  # array.copy() would compile a program for each shape
        array = jax.device_put(array, device, may_alias=False)
    return array.block_until_ready()


def _described(tensor: torch.Tensor) -> Any:
    """Return the shape and dtype that the tensor would have as an array."""
    dtype = _FLOAT8.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    return jax.ShapeDtypeStruct(tuple(tensor.shape), jax.dtypes.canonicalize_dtype(dtype))


def to_torch(array: jax.Array) -> torch.Tensor:
    """Return the array's values as a read-only tensor on the host; waits for the array."""
    if next(iter(array.devices())).platform != "cpu":
        array = jax.device_put(array, jax.devices("cpu")[0])
    for dtype, jax_dtype in _FLOAT8.items():
        if array.dtype == jax_dtype:
            return torch.from_dlpack(lax.bitcast_convert_type(array, jnp.uint8)).view(dtype)
    return torch.from_dlpack(array)


def _sent(tensor: torch.Tensor, device: jax.Device) -> jax.Array:
    """Copy a contiguous tensor to a device as a numpy array.

    Not by DLPack: it gives pinned memory, which loaders make for CUDA, as another kind of memory,
    and JAX refuses to copy that to the device.
    """
    if tensor.dtype is torch.bfloat16 or tensor.dtype in _FLOAT8:  # numpy has no name for them
        raw = torch.uint8 if tensor.dtype in _FLOAT8 else torch.int16
        dtype = _FLOAT8.get(tensor.dtype, jnp.bfloat16)
        return jax.device_put(tensor.view(raw).numpy().view(jnp.dtype(dtype)), device)
    return jax.device_put(tensor.numpy(), device)


def _from_dlpack(tensor: torch.Tensor) -> jax.Array:
    if tensor.dtype in _FLOAT8:  # DLPack has no name for them
        data = jax.dlpack.from_dlpack(tensor.view(torch.uint8))
        return lax.bitcast_convert_type(data, _FLOAT8[tensor.dtype])
    return jax.dlpack.from_dlpack(tensor)


def _to_jax_dtype(tensor: torch.Tensor) -> torch.Tensor:
    if jax.config.read("jax_enable_x64"):
        return tensor
    if tensor.dtype in (torch.float64, torch.complex128):
        return complex_numbers.singled(tensor)
    if tensor.dtype is not torch.int64:
        return tensor
    if tensor.numel():
        low, high = (int(value) for value in tensor.aminmax())
        if low < _INT32.min or high > _INT32.max:
            raise RequestError(
                f"a tensor holds int64 from {low} to {high}, and --engine jax computes in int32; "
                "set JAX_ENABLE_X64=1"
            )
    return tensor.to(torch.int32)


class PendingTensor(torch.Tensor):
    """A tensor whose values JAX is still computing.

    It waits for them where torch does anything but add such tensors.
    """

    _array: jax.Array

    @staticmethod
    def from_array(array: jax.Array) -> "PendingTensor":
        pending: PendingTensor = torch.empty(array.shape).as_subclass(PendingTensor)
        pending._array = array
        return pending

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.add and all(isinstance(a, PendingTensor) for a in args):
            return PendingTensor.from_array(args[0]._array + args[1]._array)
        computed = [to_torch(a._array).clone() if isinstance(a, PendingTensor) else a for a in args]
        return function(*computed, **(kwargs or {}))


class DeviceArrays:
    """The arrays of tensors that were sent to the device, as long as the tensors live."""

    def __init__(self) -> None:
        self._arrays: dict[int, jax.Array] = {}

    def add(self, tensor: torch.Tensor, array: jax.Array) -> None:
        """Remember the tensor's array."""
        key = id(tensor)
        self._arrays[key] = array
        weakref.finalize(tensor, self._arrays.pop, key, None)

    def get(self, tensor: torch.Tensor) -> jax.Array | None:
        """Return the tensor's array, or None if it was not sent."""
        return self._arrays.get(id(tensor))
