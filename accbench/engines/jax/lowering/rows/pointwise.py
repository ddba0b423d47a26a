"""Element-wise operations: arithmetic, comparisons, functions of one number.

16-bit floats are computed in float32 and rounded once, as torch does.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy import special

from accbench.engines.jax.lowering.dtypes import (
    is_complex,
    is_floating,
    opmath,
    result_type,
    to_floating,
)
from accbench.engines.jax.lowering.table import lowering


def in_opmath(function: Callable[..., Any], dtype: Any, *operands: Any) -> Any:
    """Apply `function` to the operands in torch's compute dtype, and return it in `dtype`."""
    return function(*(_cast(operand, opmath(dtype)) for operand in operands)).astype(dtype)


def _cast(operand: Any, dtype: Any) -> Any:
    return None if operand is None else jnp.asarray(operand, dtype)


def _arithmetic(name: str, function: Callable[..., Any]) -> None:
    """Register a row for operands of any kind, promoted together."""

    def row(self: Any, other: Any) -> Any:
        return in_opmath(function, result_type(self, other), self, other)

    lowering(*_overloads(name), pointwise=True)(row)


def _overloads(name: str) -> list[str]:
    """Return the names of torch's binary operation, for numbers on either side."""
    import torch

    known = getattr(torch.ops.aten, name).overloads()
    wanted = ("default", "Tensor", "Scalar", "Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")
    return [f"aten.{name}.{o}" for o in wanted if o in known]


def _comparison(name: str, function: Callable[..., Any]) -> None:
    def row(self: Any, other: Any) -> Any:
        dtype = result_type(self, other)
        return function(_cast(self, dtype), _cast(other, dtype))

    lowering(*_overloads(name), pointwise=True)(row)


def _logical(name: str, function: Callable[..., Any]) -> None:
    def row(self: Any, other: Any) -> Any:
        return function(self != 0, other != 0)

    lowering(*_overloads(name), pointwise=True)(row)


def _float_function(name: str, function: Callable[..., Any]) -> None:
    """Register a function whose result is a float: of integers and bools, float32."""

    def row(self: Any) -> Any:
        return in_opmath(function, to_floating(self.dtype), self)

    lowering(f"aten.{name}.default", pointwise=True)(row)


def _same_dtype(name: str, function: Callable[..., Any]) -> None:
    """Register a function whose result has its argument's dtype; no float32 is needed."""

    def row(self: Any) -> Any:
        return function(self).astype(self.dtype)

    lowering(f"aten.{name}.default", pointwise=True)(row)


def _power(base: Any, exponent: Any) -> Any:
    if jnp.issubdtype(base.dtype, jnp.inexact):
        return jnp.power(base, exponent)
    return jnp.where(exponent < 0, _negative_power(base, exponent), base ** jnp.abs(exponent))


def _negative_power(base: Any, exponent: Any) -> Any:
    """Compute 1 / base**n in whole numbers: 0, except for bases of 1 and -1."""
    odd = jnp.where(exponent % 2 == 0, 1, base)
    return jnp.where(base == 1, 1, jnp.where(base == -1, odd, 0)).astype(base.dtype)


def _floor_division(a: Any, b: Any) -> Any:
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return jnp.floor_divide(a, b)
    return jnp.where(b == 0, a / b, jnp.floor_divide(a, b))


def _truncated_division(a: Any, b: Any) -> Any:
    return jnp.trunc(a / b) if jnp.issubdtype(a.dtype, jnp.floating) else lax.div(a, b)


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "mul": jnp.multiply,
    "pow": _power,
    "atan2": lambda a, b: jnp.arctan2(a, b),
    "remainder": jnp.remainder,
    "fmod": jnp.fmod,
    "floor_divide": _floor_division,
    "bitwise_and": jnp.bitwise_and,
    "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor,
    "bitwise_left_shift": jnp.left_shift,
    "bitwise_right_shift": jnp.right_shift,
    "__lshift__": jnp.left_shift,
    "__rshift__": jnp.right_shift,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "fmax": jnp.fmax,
    "fmin": jnp.fmin,
    "nextafter": jnp.nextafter,
}

for _name, _function in _ARITHMETIC.items():
    _arithmetic(_name, _function)

_COMPARISONS: dict[str, Callable[..., Any]] = {
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
}

for _name, _function in _COMPARISONS.items():
    _comparison(_name, _function)

_LOGICAL: dict[str, Callable[..., Any]] = {
    "logical_and": jnp.logical_and,
    "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor,
}

for _name, _function in _LOGICAL.items():
    _logical(_name, _function)

_FLOAT_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "log": jnp.log,
    "log2": jnp.log2,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "sqrt": jnp.sqrt,
    "rsqrt": lax.rsqrt,
    "reciprocal": jnp.reciprocal,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tan": jnp.tan,
    "asin": jnp.arcsin,
    "acos": jnp.arccos,
    "atan": jnp.arctan,
    "sinh": jnp.sinh,
    "cosh": jnp.cosh,
    "tanh": jnp.tanh,
    "asinh": jnp.arcsinh,
    "acosh": jnp.arccosh,
    "atanh": jnp.arctanh,
    "sigmoid": jax.nn.sigmoid,
    "erf": special.erf,
    "erfc": special.erfc,
    "erfinv": special.erfinv,
    "lgamma": special.gammaln,
    "digamma": special.digamma,
    "i0": special.i0,
    "special_i0e": special.i0e,
    "special_i1": special.i1,
    "special_i1e": special.i1e,
    "special_ndtri": special.ndtri,
}

for _name, _function in _FLOAT_FUNCTIONS.items():
    _float_function(_name, _function)

_SAME_DTYPE: dict[str, Callable[..., Any]] = {
    "neg": jnp.negative,
    "sign": jnp.sign,
    "sgn": jnp.sign,
    "floor": jnp.floor,
    "ceil": jnp.ceil,
    "trunc": jnp.trunc,
    "relu": lambda x: jnp.maximum(x, 0),
    "bitwise_not": jnp.invert,
    "positive": lambda x: x,
    "alias": lambda x: x,
    "detach": lambda x: x,
    "lift": lambda x: x,
    "lift_fresh": lambda x: x,
    "lift_fresh_copy": lambda x: x,
}

for _name, _function in _SAME_DTYPE.items():
    _same_dtype(_name, _function)


@lowering("aten.abs.default", pointwise=True)
def absolute(self: Any) -> Any:
    return jnp.abs(self)


@lowering("aten.clone.default", "aten.contiguous.default", pointwise=True)
def clone(self: Any) -> Any:
    return self


@lowering("aten.add.Tensor", "aten.add.Scalar", pointwise=True)
def add(self: Any, other: Any, alpha: Any = 1) -> Any:
    if result_type(self, other) == jnp.bool_:
        return jnp.logical_or(self, other)
    return in_opmath(lambda a, b: a + _times(alpha, b), result_type(self, other), self, other)


@lowering("aten.sub.Tensor", "aten.sub.Scalar", pointwise=True)
def sub(self: Any, other: Any, alpha: Any = 1) -> Any:
    return in_opmath(lambda a, b: a - _times(alpha, b), result_type(self, other), self, other)


@lowering("aten.rsub.Tensor", "aten.rsub.Scalar", pointwise=True)
def rsub(self: Any, other: Any, alpha: Any = 1) -> Any:
    return sub(other, self, alpha)


def _times(alpha: Any, array: Any) -> Any:
    return array if alpha == 1 else jnp.asarray(alpha, array.dtype) * array


@lowering("aten.div.Tensor", "aten.div.Scalar", pointwise=True)
def div(self: Any, other: Any) -> Any:
    return in_opmath(jnp.divide, to_floating(result_type(self, other)), self, other)


@lowering("aten.div.Tensor_mode", "aten.div.Scalar_mode", pointwise=True)
def div_mode(self: Any, other: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return div(self, other)
    function = _floor_division if rounding_mode == "floor" else _truncated_division
    return in_opmath(function, result_type(self, other), self, other)


@lowering("aten.pow.Scalar", pointwise=True)
def pow_scalar(self: Any, exponent: Any) -> Any:
    return in_opmath(_power, result_type(self, exponent), self, exponent)


@lowering("aten.pow.Tensor_Scalar", pointwise=True)
def pow_number(self: Any, exponent: Any) -> Any:
    """Compute small whole powers as products, as torch does."""
    dtype = result_type(self, exponent)
    if exponent in (0.5, -0.5):
        return in_opmath(jnp.sqrt if exponent > 0 else lax.rsqrt, dtype, self)
    is_integral = not isinstance(exponent, complex) and float(exponent).is_integer()
    if is_integral and (jnp.issubdtype(dtype, jnp.inexact) or exponent >= 0):
        return in_opmath(lambda x: lax.integer_pow(x, int(exponent)), dtype, self)
    return in_opmath(_power, dtype, self, exponent)


@lowering("aten.logical_not.default", pointwise=True)
def logical_not(self: Any) -> Any:
    return self == 0


@lowering("aten.isnan.default", pointwise=True)
def isnan(self: Any) -> Any:
    return self != self


@lowering("aten.isinf.default", pointwise=True)
def isinf(self: Any) -> Any:
    return jnp.isinf(self)


@lowering("aten.isfinite.default", pointwise=True)
def isfinite(self: Any) -> Any:
    return jnp.isfinite(self)


@lowering("aten.signbit.default", pointwise=True)
def signbit(self: Any) -> Any:
    return jnp.signbit(self) if is_floating(self.dtype) else self < 0


@lowering("aten.round.default", pointwise=True)
def rounded(self: Any) -> Any:
    return jnp.round(self)


@lowering("aten.round.decimals", pointwise=True)
def round_decimals(self: Any, decimals: int = 0) -> Any:
    scale = 10.0 ** abs(decimals)
    if decimals >= 0:
        return in_opmath(lambda x: jnp.round(x * scale) / scale, self.dtype, self)
    return in_opmath(lambda x: jnp.round(x / scale) * scale, self.dtype, self)


@lowering("aten.copysign.Tensor", "aten.copysign.Scalar", pointwise=True)
def copysign(self: Any, other: Any) -> Any:
    return in_opmath(jnp.copysign, to_floating(result_type(self, other)), self, other)


@lowering("aten.hypot.default", pointwise=True)
def hypot(self: Any, other: Any) -> Any:
    return in_opmath(jnp.hypot, to_floating(result_type(self, other)), self, other)


@lowering("aten.where.self", "aten.where.ScalarSelf", "aten.where.ScalarOther", pointwise=True)
def where(condition: Any, self: Any, other: Any) -> Any:
    dtype = result_type(self, other)
    return jnp.where(condition, _cast(self, dtype), _cast(other, dtype))


@lowering("aten.where.Scalar", pointwise=True)
def where_scalar(condition: Any, self: Any, other: Any) -> Any:
    return where(condition, self, other)


@lowering("aten.masked_fill.Scalar", "aten.masked_fill.Tensor", pointwise=True)
def masked_fill(self: Any, mask: Any, value: Any) -> Any:
    return jnp.where(mask, jnp.asarray(value, self.dtype), self)


@lowering("aten.clamp.default", "aten.clamp.Tensor", pointwise=True)
def clamp(self: Any, min: Any = None, max: Any = None) -> Any:
    dtype = result_type(self, min, max)
    result = _cast(self, dtype)
    result = result if min is None else jnp.maximum(result, _cast(min, dtype))
    return result if max is None else jnp.minimum(result, _cast(max, dtype))


@lowering("aten.clamp_min.default", "aten.clamp_min.Tensor", pointwise=True)
def clamp_min(self: Any, min: Any) -> Any:
    return clamp(self, min)


@lowering("aten.clamp_max.default", "aten.clamp_max.Tensor", pointwise=True)
def clamp_max(self: Any, max: Any) -> Any:
    return clamp(self, None, max)


@lowering("aten._to_copy.default", pointwise=True)
def to_copy(self: Any, dtype: Any = None) -> Any:
    return self if dtype is None else convert(self, dtype)


@lowering("prims.convert_element_type.default", pointwise=True)
def convert(a: Any, dtype: Any) -> Any:
    if is_complex(a.dtype) and not (is_complex(dtype) or dtype == jnp.bool_):
        a = a.real  # as torch, which warns
    return a != 0 if dtype == jnp.bool_ else a.astype(dtype)


@lowering("aten.fill.Scalar", "aten.fill.Tensor")
def fill(self: Any, value: Any) -> Any:
    return jnp.full(self.shape, value, self.dtype)


@lowering("aten.copy.default")
def copy(self: Any, src: Any) -> Any:
    return jnp.broadcast_to(convert(src, self.dtype), self.shape)


@lowering("aten.addcmul.default", pointwise=True)
def addcmul(self: Any, tensor1: Any, tensor2: Any, value: Any = 1) -> Any:
    dtype = result_type(self, tensor1, tensor2)
    return in_opmath(lambda x, a, b: x + _times(value, a * b), dtype, self, tensor1, tensor2)


@lowering("aten.addcdiv.default", pointwise=True)
def addcdiv(self: Any, tensor1: Any, tensor2: Any, value: Any = 1) -> Any:
    dtype = result_type(self, tensor1, tensor2)
    return in_opmath(lambda x, a, b: x + _times(value, a) / b, dtype, self, tensor1, tensor2)


@lowering("aten.lerp.Scalar", "aten.lerp.Tensor", pointwise=True)
def lerp(self: Any, end: Any, weight: Any) -> Any:
    def between(a: Any, b: Any, w: Any) -> Any:
        return jnp.where(jnp.abs(w) < 0.5, a + w * (b - a), b - (b - a) * (1 - w))

    return in_opmath(between, result_type(self, end), self, end, weight)


@lowering("aten.polygamma.default", pointwise=True)
def polygamma(n: int, self: Any) -> Any:
    return in_opmath(lambda x: special.polygamma(n, x), to_floating(self.dtype), self)
