"""Activations, and their gradients as torch's autograd asks for them."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy import special

from accbench.engines.jax.lowering.dtypes import result_type
from accbench.engines.jax.lowering.rows.pointwise import in_opmath
from accbench.engines.jax.lowering.table import lowering

_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBE = 0.044715


def _activation(name: str, function: Callable[..., Any]) -> None:
    def row(self: Any) -> Any:
        return in_opmath(function, self.dtype, self)

    lowering(f"aten.{name}.default", pointwise=True)(row)


def _backward(name: str, function: Callable[..., Any]) -> None:
    """Register the row `function(gradient, saved)`; saved is the activation's input or output."""

    def row(grad_output: Any, saved: Any) -> Any:
        return in_opmath(function, result_type(grad_output, saved), grad_output, saved)

    lowering(f"aten.{name}.default", pointwise=True)(row)


def _silu_slope(x: Any) -> Any:
    s = jax.nn.sigmoid(x)
    return s * (1 + x * (1 - s))


def _hardswish_slope(x: Any) -> Any:
    return jnp.where(x <= -3, 0, jnp.where(x < 3, x / 3 + 0.5, 1))


def _mish_slope(x: Any) -> Any:
    s, t = jax.nn.sigmoid(x), jnp.tanh(jax.nn.softplus(x))
    return t + x * s * (1 - t * t)


_ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "silu": lambda x: x * jax.nn.sigmoid(x),
    "mish": lambda x: x * jnp.tanh(jax.nn.softplus(x)),
    "hardsigmoid": lambda x: jnp.clip(x + 3, 0, 6) / 6,
    "hardswish": lambda x: x * jnp.clip(x + 3, 0, 6) / 6,
}

for _name, _function in _ACTIVATIONS.items():
    _activation(_name, _function)

_BACKWARD: dict[str, Callable[..., Any]] = {
    "silu_backward": lambda g, x: g * _silu_slope(x),
    "mish_backward": lambda g, x: g * _mish_slope(x),
    "hardsigmoid_backward": lambda g, x: jnp.where((x > -3) & (x < 3), g / 6, 0),
    "hardswish_backward": lambda g, x: g * _hardswish_slope(x),
    "sigmoid_backward": lambda g, y: g * (1 - y) * y,
    "tanh_backward": lambda g, y: g * (1 - y * y),
}

for _name, _function in _BACKWARD.items():
    _backward(_name, _function)


@lowering("aten.gelu.default", pointwise=True)
def gelu(self: Any, approximate: str = "none") -> Any:
    def exact(x: Any) -> Any:
        return x * 0.5 * (1 + special.erf(x * math.sqrt(0.5)))

    def by_tanh(x: Any) -> Any:
        return 0.5 * x * (1 + jnp.tanh(_TANH_SCALE * (x + _TANH_CUBE * x * x * x)))

    return in_opmath(by_tanh if approximate == "tanh" else exact, self.dtype, self)


@lowering("aten.gelu_backward.default", pointwise=True)
def gelu_backward(grad_output: Any, self: Any, approximate: str = "none") -> Any:
    def exact(g: Any, x: Any) -> Any:
        cdf = 0.5 * (1 + special.erf(x * math.sqrt(0.5)))
        density = jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        return g * (cdf + x * density)

    def by_tanh(g: Any, x: Any) -> Any:
        t = jnp.tanh(_TANH_SCALE * (x + _TANH_CUBE * x * x * x))
        inner = _TANH_SCALE * (1 + 3 * _TANH_CUBE * x * x)
        return g * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner)

    function = by_tanh if approximate == "tanh" else exact
    if self.dtype.itemsize == 2:  # or XLA keeps it in 32 bits from the forward pass on
        self = jax.lax.optimization_barrier(self)
    return in_opmath(function, result_type(grad_output, self), grad_output, self)


@lowering("aten.hardtanh.default", pointwise=True)
def hardtanh(self: Any, min_val: Any = -1, max_val: Any = 1) -> Any:
    low, high = (jnp.asarray(v, self.dtype) for v in (min_val, max_val))
    return jnp.minimum(jnp.maximum(self, low), high)


@lowering("aten.hardtanh_backward.default", pointwise=True)
def hardtanh_backward(grad_output: Any, self: Any, min_val: Any, max_val: Any) -> Any:
    outside = (self <= min_val) | (self >= max_val)
    return jnp.where(outside, jnp.zeros((), grad_output.dtype), grad_output)


@lowering("aten.threshold.default", pointwise=True)
def threshold(self: Any, threshold: Any, value: Any) -> Any:
    return jnp.where(self <= threshold, jnp.asarray(value, self.dtype), self)


@lowering("aten.threshold_backward.default", pointwise=True)
def threshold_backward(grad_output: Any, self: Any, threshold: Any) -> Any:
    return jnp.where(self <= threshold, jnp.zeros((), grad_output.dtype), grad_output)


@lowering("aten.leaky_relu.default", pointwise=True)
def leaky_relu(self: Any, negative_slope: Any = 0.01) -> Any:
    return in_opmath(lambda x: jnp.where(x > 0, x, x * negative_slope), self.dtype, self)


@lowering("aten.leaky_relu_backward.default", pointwise=True)
def leaky_relu_backward(
    grad_output: Any, self: Any, negative_slope: Any, self_is_result: bool
) -> Any:
    def slope(g: Any, x: Any) -> Any:
        return jnp.where(x > 0, g, g * negative_slope)

    return in_opmath(slope, result_type(grad_output, self), grad_output, self)


@lowering("aten.elu.default", pointwise=True)
def elu(self: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Any:
    def function(x: Any) -> Any:
        return jnp.where(x > 0, x * scale, jnp.expm1(x * input_scale) * alpha * scale)

    return in_opmath(function, self.dtype, self)


@lowering("aten.elu_backward.default", pointwise=True)
def elu_backward(
    grad_output: Any,
    alpha: Any,
    scale: Any,
    input_scale: Any,
    is_result: bool,
    self_or_result: Any,
) -> Any:
    def function(g: Any, x: Any) -> Any:
        negative_slope = (
            x + alpha * scale if is_result else alpha * scale * jnp.exp(x * input_scale)
        )
        return g * jnp.where(x <= 0, input_scale * negative_slope, scale)

    dtype = result_type(grad_output, self_or_result)
    return in_opmath(function, dtype, grad_output, self_or_result)


@lowering("aten.softplus.default", pointwise=True)
def softplus(self: Any, beta: Any = 1, threshold: Any = 20) -> Any:
    def function(x: Any) -> Any:
        return jnp.where(x * beta > threshold, x, jnp.log1p(jnp.exp(x * beta)) / beta)

    return in_opmath(function, self.dtype, self)


@lowering("aten.softplus_backward.default", pointwise=True)
def softplus_backward(grad_output: Any, self: Any, beta: Any, threshold: Any) -> Any:
    def function(g: Any, x: Any) -> Any:
        return jnp.where(x * beta > threshold, g, g * jax.nn.sigmoid(x * beta))

    return in_opmath(function, result_type(grad_output, self), grad_output, self)


@lowering("aten.log_sigmoid_forward.default")
def log_sigmoid_forward(self: Any) -> Any:
    """Compute log(sigmoid(x)), and an empty buffer.

    The buffer belongs to torch's CPU kernel and means nothing; AOTAutograd wants a tensor.
    """
    return in_opmath(jax.nn.log_sigmoid, self.dtype, self), jnp.zeros_like(self)


@lowering("aten.log_sigmoid_backward.default")
def log_sigmoid_backward(grad_output: Any, self: Any, buffer: Any) -> Any:
    def function(g: Any, x: Any) -> Any:
        return g * jax.nn.sigmoid(-x)

    return in_opmath(function, result_type(grad_output, self), grad_output, self)


@lowering("aten.glu.default")
def glu(self: Any, dim: int = -1) -> Any:
    a, b = jnp.split(self, 2, dim)
    return in_opmath(lambda a, b: a * jax.nn.sigmoid(b), self.dtype, a, b)


@lowering("aten.glu_backward.default")
def glu_backward(grad_output: Any, self: Any, dim: int) -> Any:
    def function(g: Any, a: Any, b: Any) -> Any:
        s = jax.nn.sigmoid(b)
        return jnp.concatenate([g * s, g * a * s * (1 - s)], dim)

    return in_opmath(function, self.dtype, grad_output, *jnp.split(self, 2, dim))
