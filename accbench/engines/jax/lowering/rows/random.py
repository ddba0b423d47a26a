"""Random numbers from the run's key: repeatable, but not torch's own numbers."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p

from accbench.engines.jax.lowering.context import Context
from accbench.engines.jax.lowering.dtypes import int64_dtype, opmath
from accbench.engines.jax.lowering.table import lowering


def _uniform(context: Context, shape: Sequence[int], dtype: Any) -> Any:
    return jax.random.uniform(context.next_key(), shape, opmath(dtype)).astype(dtype)


def _normal(context: Context, shape: Sequence[int], dtype: Any) -> Any:
    return jax.random.normal(context.next_key(), shape, opmath(dtype)).astype(dtype)


# Draws of one evaluation of threefry, 16 of its 64 bits each.
_DRAWS_PER_BLOCK = 4


def _keep_mask(key: Any, keep_probability: float, shape: Sequence[int]) -> Any:
    """Draw booleans that are True with a probability, which is rounded to 1 / 65,536.

    `jax.random.bernoulli` evaluates threefry for each of them, which takes a GPU longer than it
    takes to write the masks of attention's weights. Here four neighbours share one evaluation.
    """
    num_blocks = -(-math.prod(shape) // _DRAWS_PER_BLOCK)
    words = jax.random.key_data(key)
    if words.shape != (2,) or math.prod(shape) > 2**32:  # another generator, or too many to count
        return jax.random.bernoulli(key, keep_probability, shape)
    draws = jax.lax.platform_dependent(
        words, cuda=partial(_draws_side_by_side, num_blocks), default=partial(_draws, num_blocks)
    )
    mask = draws < round(keep_probability * 2**16)
    return mask[: math.prod(shape)].reshape(shape)


def _draws(num_blocks: int, words: Any) -> Any:
    """Return the draws of so many blocks, each below 65,536, block after block."""
    low, high = _blocks(words, jax.lax.iota(jnp.uint32, num_blocks))
    return (jnp.stack([low, low >> 16, high, high >> 16], -1) & 0xFFFF).reshape(-1)


def _draws_side_by_side(num_blocks: int, words: Any) -> Any:
    """Return the same in a form that a GPU fuses with what reads them, and writes nowhere."""
    index = jax.lax.iota(jnp.uint32, num_blocks * _DRAWS_PER_BLOCK)
    block, place = index // _DRAWS_PER_BLOCK, index % _DRAWS_PER_BLOCK
    low, high = _blocks(words, block)
    return (jnp.where(place < 2, low, high) >> (16 * (place % 2))) & 0xFFFF


def _blocks(words: Any, numbers: Any) -> Any:
    return threefry2x32_p.bind(words[0], words[1], jnp.zeros_like(numbers), numbers)


@lowering("aten.native_dropout.default", context=True)
def dropout(context: Context, input: Any, p: float, train: bool | None) -> tuple[Any, Any]:
    """Return the input with dropout, scaled, and the mask of what was kept."""
    if train is False or p == 0:
        return input, jnp.ones(input.shape, jnp.bool_)
    if p == 1:
        return jnp.zeros_like(input), jnp.zeros(input.shape, jnp.bool_)
    mask = _keep_mask(context.next_key(), 1 - p, input.shape)
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
