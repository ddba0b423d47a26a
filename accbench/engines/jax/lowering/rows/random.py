"""Random numbers from the run's key: repeatable, but not torch's own numbers."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from accbench.engines.jax.lowering.context import Context
from accbench.engines.jax.lowering.dtypes import int64_dtype, opmath
from accbench.engines.jax.lowering.table import lowering


def _uniform(context: Context, shape: Sequence[int], dtype: Any) -> Any:
    return jax.random.uniform(context.next_key(), shape, opmath(dtype)).astype(dtype)


def _normal(context: Context, shape: Sequence[int], dtype: Any) -> Any:
    return jax.random.normal(context.next_key(), shape, opmath(dtype)).astype(dtype)


@lowering("aten.native_dropout.default", context=True)
def dropout(context: Context, input: Any, p: float, train: bool | None) -> tuple[Any, Any]:
    """Return the input with dropout, scaled, and the mask of what was kept."""
    if train is False or p == 0:
        return input, jnp.ones(input.shape, jnp.bool_)
    if p == 1:
        return jnp.zeros_like(input), jnp.zeros(input.shape, jnp.bool_)
    mask = jax.random.bernoulli(context.next_key(), 1 - p, input.shape)
    scaled = input.astype(opmath(input.dtype)) * (1 / (1 - p))
    return jnp.where(mask, scaled, 0).astype(input.dtype), mask


@lowering("aten.native_dropout_backward.default")
def dropout_backward(grad_output: Any, mask: Any, scale: float) -> Any:
    wide = grad_output.astype(opmath(grad_output.dtype)) * scale
    return jnp.where(mask, wide, 0).astype(grad_output.dtype)


@lowering("aten.bernoulli.p", context=True)
def bernoulli(context: Context, self: Any, p: float) -> Any:
    return jax.random.bernoulli(context.next_key(), p, self.shape).astype(self.dtype)


@lowering("aten.bernoulli.default", context=True)
def bernoulli_of(context: Context, self: Any) -> Any:
    probability = self.astype(opmath(self.dtype))
    return jax.random.bernoulli(context.next_key(), probability).astype(self.dtype)


@lowering("aten.rand.default", context=True)
def rand(context: Context, size: Sequence[int], dtype: Any = None) -> Any:
    return _uniform(context, size, jnp.float32 if dtype is None else dtype)


@lowering("aten.rand_like.default", context=True)
def rand_like(context: Context, self: Any, dtype: Any = None) -> Any:
    return _uniform(context, self.shape, self.dtype if dtype is None else dtype)


@lowering("aten.uniform.default", context=True)
def uniform(context: Context, self: Any, from_: float = 0, high: float = 1) -> Any:
    values = _uniform(context, self.shape, opmath(self.dtype))
    return (from_ + values * (high - from_)).astype(self.dtype)


@lowering("aten.randn.default", context=True)
def randn(context: Context, size: Sequence[int], dtype: Any = None) -> Any:
    return _normal(context, size, jnp.float32 if dtype is None else dtype)


@lowering("aten.randn_like.default", context=True)
def randn_like(context: Context, self: Any, dtype: Any = None) -> Any:
    return _normal(context, self.shape, self.dtype if dtype is None else dtype)


@lowering("aten.normal_functional.default", context=True)
def normal(context: Context, self: Any, mean: float = 0, std: float = 1) -> Any:
    values = _normal(context, self.shape, opmath(self.dtype))
    return (mean + values * std).astype(self.dtype)


@lowering("aten.exponential.default", context=True)
def exponential(context: Context, self: Any, lambd: float = 1) -> Any:
    values = jax.random.exponential(context.next_key(), self.shape, opmath(self.dtype))
    return (values / lambd).astype(self.dtype)


def _integers(context: Context, low: int, high: int, size: Sequence[int], dtype: Any) -> Any:
    values = jax.random.randint(context.next_key(), size, low, high)
    return values.astype(int64_dtype() if dtype is None else dtype)


@lowering("aten.randint.default", context=True)
def randint(context: Context, high: int, size: Sequence[int], dtype: Any = None) -> Any:
    return _integers(context, 0, high, size, dtype)


@lowering("aten.randint.low", context=True)
def randint_low(
    context: Context, low: int, high: int, size: Sequence[int], dtype: Any = None
) -> Any:
    return _integers(context, low, high, size, dtype)


@lowering("aten.randint_like.default", context=True)
def randint_like(context: Context, self: Any, high: int, dtype: Any = None) -> Any:
    return _integers(context, 0, high, self.shape, dtype or self.dtype)


@lowering("aten.randint_like.low_dtype", context=True)
def randint_like_low(context: Context, self: Any, low: int, high: int, dtype: Any = None) -> Any:
    return _integers(context, low, high, self.shape, dtype or self.dtype)


@lowering("aten.randperm.default", context=True)
def randperm(context: Context, n: int, dtype: Any = None) -> Any:
    order = jax.random.permutation(context.next_key(), n)
    return order.astype(int64_dtype() if dtype is None else dtype)


@lowering("aten.rrelu_with_noise_functional.default", context=True)
def rrelu(
    context: Context, self: Any, noise: Any, lower: Any = 0.125, upper: Any = 1 / 3,
    training: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """Multiply negative numbers by drawn slopes, which the gradient reads; or by their mean."""
    wide = self.astype(opmath(self.dtype))
    if not training:
        return jnp.where(wide <= 0, wide * (lower + upper) / 2, wide).astype(self.dtype), noise
    slopes = lower + (upper - lower) * _uniform(context, self.shape, wide.dtype)
    slopes = jnp.where(wide <= 0, slopes, 1)
    return (wide * slopes).astype(self.dtype), slopes.astype(noise.dtype)
