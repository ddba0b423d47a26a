"""torch's dtypes in JAX, and torch's rules of type promotion.

JAX has int64 and float64 only where `jax_enable_x64` is set. Without it int64 becomes int32, which
holds labels, token numbers and positions. `check_range` refuses values that do not fit when
tensors come in, and sums of integers inside a graph wrap at 2**31. float64 is refused unless a rule
(`float64_as_float32`) allows float32 for it. 0-d float64 tensors, which torch's promotion treats
like Python numbers, always become float32. In the same way complex128 becomes complex64.
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
    """Return the numpy dtype that stands for torch's in JAX.

    Raises:
        RequestError: there is none.
    """
    if dtype not in _JAX:
        raise RequestError(f"engine jax has no {dtype}; it knows {', '.join(map(str, _JAX))}")
    return jax.dtypes.canonicalize_dtype(_JAX[dtype])


def int64_dtype() -> Any:
    """Return what stands for torch.int64 in JAX: the dtype of indices."""
    return jax_dtype(torch.int64)


def check_range(array: np.ndarray, name: str = "a tensor") -> np.ndarray:
    """Return the array in the dtype that JAX will hold it in.

    Args:
        array: on the host.
        name: of the tensor, for the error.

    Raises:
        RequestError: int64 values do not fit into int32, where JAX has no int64.
    """
    narrow = jax.dtypes.canonicalize_dtype(array.dtype)
    if narrow == array.dtype:
        return array
    if array.dtype.kind in "iu" and array.size:
        limits = np.iinfo(narrow)
        lowest, highest = array.min(), array.max()
        if lowest < limits.min or highest > limits.max:
            raise RequestError(
                f"{name} holds {lowest} to {highest}, which JAX's {narrow} cannot; "
                "set JAX_ENABLE_X64=1, or keep such numbers out of the model"
            )
    return array.astype(narrow)


def to_jax(tensor: torch.Tensor, name: str = "a tensor") -> jax.Array:
    """Copy a tensor to a jax array of the same shape.

    Args:
        tensor: on any device.
        name: of the tensor, for the error.

    Raises:
        RequestError: JAX does not have its dtype, or its values do not fit.
    """
    dtype = jax_dtype(tensor.dtype)
    host = tensor.detach().cpu().resolve_neg().contiguous()
    if tensor.dtype == torch.bfloat16:  # numpy has no bfloat16
        return jnp.asarray(host.view(torch.int16).numpy().view(dtype))
    return jnp.asarray(check_range(host.numpy(), name), copy=True)


def is_floating(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def is_complex(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.complexfloating)


def opmath(dtype: Any) -> Any:
    """Return the dtype in which torch computes on this one: float32 for 16-bit floats."""
    return jnp.float32 if dtype in (jnp.bfloat16, jnp.float16) else jnp.dtype(dtype)


def to_floating(dtype: Any) -> Any:
    """Return the dtype that a function such as sqrt gives.

    Floats and complex numbers stay, all else becomes float32.
    """
    stays = is_floating(dtype) or is_complex(dtype)
    return jnp.dtype(dtype) if stays else jnp.dtype(jnp.float32)


def dtype_of_number(value: bool | int | float | complex) -> Any:
    """Return the dtype that torch gives to a Python number alone."""
    if isinstance(value, complex):
        return jnp.dtype(jnp.complex64)
    if isinstance(value, bool):
        return jnp.dtype(jnp.bool_)
    return int64_dtype() if isinstance(value, int) else jnp.dtype(jnp.float32)


def result_type(*operands: Any) -> Any:
    """Return the dtype to which torch promotes arrays and Python numbers.

    Arrays with axes decide; 0-d arrays, and after them numbers, count only where theirs is a
    higher category (bool < integer < float < complex). See `at::result_type`.
    """
    dims = zeros = numbers = None
    for operand in operands:
        if operand is None:
            continue
        if not hasattr(operand, "dtype"):
            numbers = _promote(numbers, dtype_of_number(operand))
        elif operand.ndim:
            dims = _promote(dims, operand.dtype)
        else:
            zeros = _promote(zeros, operand.dtype)
    return _combine_categories(dims, _combine_categories(zeros, numbers))


def _promote(a: Any, b: Any) -> Any:
    return jnp.dtype(b) if a is None else jnp.promote_types(a, b)


def _combine_categories(higher: Any, lower: Any) -> Any:
    """Return torch's `combine_categories`.

    That is the higher's dtype, unless the lower's category is above.
    """
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
