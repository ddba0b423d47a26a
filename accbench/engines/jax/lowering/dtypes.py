"""torch's dtypes in JAX, and torch's rules of what two of them give together.

JAX has int64 and float64 only where `jax_enable_x64` is set. Without it int64 is int32, which
holds labels, token numbers and positions; at the border `checked` refuses values that don't fit,
and sums of integers inside a graph wrap at 2**31. float64 is refused unless a rule
(`float64_as_float32`) says that float32 will do; 0-d float64 tensors, which torch's promotion
treats like Python numbers, are float32 always. Likewise complex128 is complex64.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from accbench.errors import RequestError

_JAX: dict[torch.dtype, Any] = {
    torch.float64: jnp.float64,
    torch.float32: jnp.float32,
    torch.bfloat16: jnp.bfloat16,
    torch.float16: jnp.float16,
    torch.int64: jnp.int64,
    torch.int32: jnp.int32,
    torch.int16: jnp.int16,
    torch.int8: jnp.int8,
    torch.uint8: jnp.uint8,
    torch.bool: jnp.bool_,
    torch.uint16: jnp.uint16,
    torch.uint32: jnp.uint32,
    torch.complex64: jnp.complex64,
    torch.complex128: jnp.complex128,
    torch.float8_e4m3fn: jnp.float8_e4m3fn,
    torch.float8_e5m2: jnp.float8_e5m2,
    torch.float8_e4m3fnuz: jnp.float8_e4m3fnuz,
    torch.float8_e5m2fnuz: jnp.float8_e5m2fnuz,
}


def jax_dtype(dtype: torch.dtype) -> Any:
    """The numpy dtype that stands for torch's in JAX.

    Raises:
        RequestError: there is none.
    """
    if dtype not in _JAX:
        raise RequestError(f"engine jax has no {dtype}; it knows {', '.join(map(str, _JAX))}")
    return jax.dtypes.canonicalize_dtype(_JAX[dtype])


def wide_int() -> Any:
    """What stands for torch.int64: the dtype of indices."""
    return jax_dtype(torch.int64)


def checked(array: np.ndarray, name: str = "a tensor") -> np.ndarray:
    """The array in the dtype that JAX will hold it in, if its values fit.

    Raises:
        RequestError: int64 values beyond int32, where JAX has no int64.
    """
    held = jax.dtypes.canonicalize_dtype(array.dtype)
    if held == array.dtype:
        return array
    if array.dtype.kind in "iu" and array.size:
        limits = np.iinfo(held)
        least, most = array.min(), array.max()
        if least < limits.min or most > limits.max:
            raise RequestError(
                f"{name} holds {least} to {most}, which JAX's {held} cannot; "
                "set JAX_ENABLE_X64=1, or keep such numbers out of the model"
            )
    return array.astype(held)


def to_jax(tensor: torch.Tensor, name: str = "a tensor") -> jax.Array:
    """A copy of a tensor as a jax array of the same shape.

    Raises:
        RequestError: its dtype isn't one of JAX's, or its values don't fit in it.
    """
    dtype = jax_dtype(tensor.dtype)
    host = tensor.detach().cpu().resolve_neg().contiguous()
    if tensor.dtype == torch.bfloat16:  # which numpy doesn't know
        return jnp.asarray(host.view(torch.int16).numpy().view(dtype))
    return jnp.asarray(checked(host.numpy(), name), copy=True)


def is_floating(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def is_complex(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.complexfloating)


def opmath(dtype: Any) -> Any:
    """The dtype in which torch computes an operation on 16-bit floats: float32."""
    return jnp.float32 if dtype in (jnp.bfloat16, jnp.float16) else jnp.dtype(dtype)


def floating(dtype: Any) -> Any:
    """What a function such as sqrt makes of a dtype: floats and complex numbers stay, all else
    becomes float32."""
    stays = is_floating(dtype) or is_complex(dtype)
    return jnp.dtype(dtype) if stays else jnp.dtype(jnp.float32)


def of_number(value: bool | int | float | complex) -> Any:
    """The dtype that torch gives to a Python number alone."""
    if isinstance(value, complex):
        return jnp.dtype(jnp.complex64)
    if isinstance(value, bool):
        return jnp.dtype(jnp.bool_)
    return wide_int() if isinstance(value, int) else jnp.dtype(jnp.float32)


def result_type(*operands: Any) -> Any:
    """The dtype that torch promotes operands to: arrays and Python numbers.

    Arrays with axes decide; 0-d arrays, and after them numbers, count only where theirs is a
    higher category (bool < integer < float < complex). See `at::result_type`.
    """
    dims = zeros = numbers = None
    for operand in operands:
        if operand is None:
            continue
        if not hasattr(operand, "dtype"):
            numbers = _joined(numbers, of_number(operand))
        elif operand.ndim:
            dims = _joined(dims, operand.dtype)
        else:
            zeros = _joined(zeros, operand.dtype)
    return _over(dims, _over(zeros, numbers))


def _joined(a: Any, b: Any) -> Any:
    return jnp.dtype(b) if a is None else jnp.promote_types(a, b)


def _over(higher: Any, lower: Any) -> Any:
    """`combine_categories` of torch: the higher's dtype unless the lower's category is above."""
    if higher is None or lower is None:
        return lower if higher is None else higher
    if is_complex(higher):
        return higher
    if is_complex(lower):
        wide = jnp.dtype(higher) == jnp.float64
        return jnp.dtype(jnp.complex128) if wide else jnp.dtype(jnp.complex64)
    if is_floating(higher):
        return higher
    if higher == jnp.bool_ or is_floating(lower):
        return jnp.promote_types(higher, lower)
    return higher
