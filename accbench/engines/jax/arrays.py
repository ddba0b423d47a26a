"""Tensors of torch on the host to arrays of JAX, and back."""

import weakref
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from accbench.distributed import complex_numbers
from accbench.errors import RequestError

# XLA on the CPU reads arrays at such addresses only.
_ALIGNED_BYTES = 64
_INT32 = torch.iinfo(torch.int32)
_FLOAT8 = {
    torch.float8_e4m3fn: jnp.float8_e4m3fn,
    torch.float8_e5m2: jnp.float8_e5m2,
    torch.float8_e4m3fnuz: jnp.float8_e4m3fnuz,
    torch.float8_e5m2fnuz: jnp.float8_e5m2fnuz,
}


def lent(tensor: torch.Tensor, device: jax.Device) -> jax.Array:
    """The tensor as an array that only reads it: its own memory, where that can be.

    Where JAX has no int64 (`jax_enable_x64`), int64 is int32.

    Raises:
        RequestError: a number is too large for that.
    """
    tensor = _narrowed(tensor.detach().resolve_conj().resolve_neg())
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.data_ptr() % _ALIGNED_BYTES:
        tensor = tensor.clone()
    array = _from_dlpack(tensor)
    if device.platform != "cpu":
        return jax.device_put(array, device)
    # JAX keeps the tensor by its capsule, which is enough for what reads it later.
    return array


def owned(tensor: torch.Tensor, device: jax.Device) -> jax.Array:
    """A copy of the tensor, which a step may write to; it is made when this returns."""
    array = lent(tensor, device)
    if device.platform == "cpu":
        array = array.copy()
    return array.block_until_ready()


def tensor_of(array: jax.Array) -> torch.Tensor:
    """What an array holds, on the host; waits for it, and is not to be written to."""
    if next(iter(array.devices())).platform != "cpu":
        array = jax.device_put(array, jax.devices("cpu")[0])
    for dtype, own in _FLOAT8.items():
        if array.dtype == own:
            return torch.from_dlpack(lax.bitcast_convert_type(array, jnp.uint8)).view(dtype)
    return torch.from_dlpack(array)


def _from_dlpack(tensor: torch.Tensor) -> jax.Array:
    if tensor.dtype in _FLOAT8:  # which dlpack has no name for
        data = jax.dlpack.from_dlpack(tensor.view(torch.uint8))
        return lax.bitcast_convert_type(data, _FLOAT8[tensor.dtype])
    return jax.dlpack.from_dlpack(tensor)


def _narrowed(tensor: torch.Tensor) -> torch.Tensor:
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


class Pending(torch.Tensor):
    """Numbers that are being computed, as a tensor: waits for them where torch does anything but
    add them to others."""

    _array: jax.Array

    @staticmethod
    def of(array: jax.Array) -> "Pending":
        made: Pending = torch.empty(array.shape).as_subclass(Pending)
        made._array = array
        return made

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.add and all(isinstance(a, Pending) for a in args):
            return Pending.of(args[0]._array + args[1]._array)
        known = [tensor_of(a._array).clone() if isinstance(a, Pending) else a for a in args]
        return function(*known, **(kwargs or {}))


class Sent:
    """Arrays of tensors that were sent to the device, for as long as the tensors are there."""

    def __init__(self) -> None:
        self._arrays: dict[int, jax.Array] = {}

    def keep(self, tensor: torch.Tensor, array: jax.Array) -> None:
        """Remember it."""
        number = id(tensor)
        self._arrays[number] = array
        weakref.finalize(tensor, self._arrays.pop, number, None)

    def get(self, tensor: torch.Tensor) -> jax.Array | None:
        """The tensor's array, if it was sent."""
        return self._arrays.get(id(tensor))
