"""Batch, layer and group normalization, softmax, and their gradients, computed in float32."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from accbench.engines.jax.lowering.dtypes import opmath
from accbench.engines.jax.lowering.table import lowering

Train = Callable[..., tuple[Any, Any, Any, Any, Any]]
"""A function like `batch_norm_train`, of this module or another."""


def channels(vector: Any, ndim: int, axis: int = 1) -> Any:
    """Reshape (C,) to (C, 1, ...), to broadcast over (N, C, *spatial) or along another axis."""
    return vector.reshape([-1 if a == axis % ndim else 1 for a in range(ndim)])


def _other_axes(axis: int, ndim: int) -> tuple[int, ...]:
    return tuple(a for a in range(ndim) if a != axis % ndim)


def _wide(*arrays: Any) -> list[Any]:
    return [None if a is None else a.astype(opmath(a.dtype)) for a in arrays]


def _affine(x: Any, mean: Any, scale: Any, bias: Any, axis: int) -> Any:
    """Compute (x - mean) * scale + bias over channels."""
    y = (x - channels(mean, x.ndim, axis)) * channels(scale, x.ndim, axis)
    return y if bias is None else y + channels(bias, x.ndim, axis)


def _batch_statistics(x: Any, eps: float, axis: int) -> tuple[Any, Any, Any]:
    """Return mean, biased variance and 1 / deviation of each channel, over other axes."""
    over = _other_axes(axis, x.ndim)
    mean = jnp.mean(x, over)
    variance = jnp.mean(jnp.square(x - channels(mean, x.ndim, axis)), over)
    return mean, variance, lax.rsqrt(variance + eps)


def batch_norm_train(
    input: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float, axis: int
) -> tuple[Any, Any, Any, Any, Any]:
    """Return output, batch mean, 1 / deviation, and the new running mean and variance."""
    x, w, b = _wide(input, weight, bias)
    batch_mean, batch_var, invstd = _batch_statistics(x, eps, axis)
    y = _affine(x, batch_mean, invstd if w is None else invstd * w, b, axis).astype(input.dtype)
    n = x.size // max(x.shape[axis], 1)
    # Running variances are unbiased; with one value for each channel torch's is NaN or inf.
    unbiased = batch_var * (n / (n - 1) if n > 1 else jnp.inf)
    return (
        y,
        batch_mean,
        invstd,
        _update_running(mean, batch_mean, momentum),
        _update_running(var, unbiased, momentum),
    )


def _update_running(running: Any, batch_value: Any, momentum: float) -> Any:
    if running is None:
        return None
    (wide,) = _wide(running)
    return (wide * (1 - momentum) + batch_value * momentum).astype(running.dtype)


def batch_norm_eval(
    input: Any, weight: Any, bias: Any, mean: Any, var: Any, eps: float, axis: int
) -> Any:
    x, w, b, m, v = _wide(input, weight, bias, mean, var)
    invstd = lax.rsqrt(v + eps)
    return _affine(x, m, invstd if w is None else invstd * w, b, axis).astype(input.dtype)


def _empty(dtype: Any) -> Any:
    """Return what torch gives in place of statistics that were not computed."""
    return jnp.zeros((0,), dtype)


@lowering("aten._native_batch_norm_legit_functional.default")
def batch_norm_functional(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    axis: int = 1,
    train: Train = batch_norm_train,
) -> tuple[Any, ...]:
    if training:
        return train(input, weight, bias, running_mean, running_var, momentum, eps, axis)
    y = batch_norm_eval(input, weight, bias, running_mean, running_var, eps, axis)
    empty = _empty(jnp.float32)
    return y, empty, empty, running_mean, running_var


@lowering("aten._native_batch_norm_legit.no_stats")
def batch_norm_no_stats(
    input: Any,
    weight: Any,
    bias: Any,
    training: bool,
    momentum: float,
    eps: float,
    axis: int = 1,
    train: Train = batch_norm_train,
) -> tuple[Any, ...]:
    return train(input, weight, bias, None, None, momentum, eps, axis)[:3]


@lowering("aten._native_batch_norm_legit_no_training.default")
def batch_norm_no_training(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    momentum: float,
    eps: float,
    axis: int = 1,
) -> tuple[Any, ...]:
    empty = _empty(jnp.float32)
    return batch_norm_eval(input, weight, bias, running_mean, running_var, eps, axis), empty, empty


@lowering("aten.native_batch_norm.default")
def native_batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    axis: int = 1,
    train: Train = batch_norm_train,
) -> tuple[Any, ...]:
    """Compute BatchNorm without running statistics, or in evaluation.

    In all other cases a graph has the functional operation.
    """
    results = batch_norm_functional(
        input, weight, bias, running_mean, running_var, training, momentum, eps, axis, train
    )
    return results[:3]


@lowering("aten._batch_norm_with_update_functional.default")
def batch_norm_with_update(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    momentum: float,
    eps: float,
    axis: int = 1,
    train: Train = batch_norm_train,
) -> tuple[Any, ...]:
    y, mean, invstd, new_mean, new_var = train(
        input, weight, bias, running_mean, running_var, momentum, eps, axis
    )
    return y, mean, invstd, _empty(jnp.uint8), new_mean, new_var


@lowering("aten._batch_norm_no_update.default")
def batch_norm_no_update(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    momentum: float,
    eps: float,
    axis: int = 1,
) -> tuple[Any, ...]:
    y = batch_norm_eval(input, weight, bias, running_mean, running_var, eps, axis)
    return y, _empty(jnp.float32), _empty(jnp.float32), _empty(jnp.uint8)


@lowering("aten.native_batch_norm_backward.default")
def batch_norm_backward(
    grad_out: Any,
    input: Any,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_invstd: Any,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
    axis: int = 1,
) -> tuple[Any, Any, Any]:
    g, x, w = _wide(grad_out, input, weight)
    over, n = _other_axes(axis, x.ndim), x.size // max(x.shape[axis], 1)
    mean, invstd = _wide(save_mean, save_invstd)
    if not train:
        mean, running = _wide(running_mean, running_var)
        invstd = lax.rsqrt(running + eps)
    bias_grad = jnp.sum(g, over)
    # Not sum(g * (x - mean)): XLA would keep x - mean of all layers in memory.
    weight_grad = (jnp.sum(g * x, over) - mean * bias_grad) * invstd
    scale = channels(invstd if w is None else invstd * w, x.ndim, axis)
    if train:
        slope = channels(weight_grad * invstd / n, x.ndim, axis)
        g = g - channels(bias_grad / n, x.ndim, axis) - (x - channels(mean, x.ndim, axis)) * slope
    dtype = input.dtype if weight is None else weight.dtype
    grads = ((g * scale).astype(input.dtype), weight_grad.astype(dtype), bias_grad.astype(dtype))
    return tuple(v if m else None for v, m in zip(grads, output_mask, strict=True))  # type: ignore[return-value]


@lowering("aten.batch_norm_backward.default")
def batch_norm_backward_with_reserve(
    grad_out: Any,
    input: Any,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_var: Any,
    update: bool,
    eps: float,
    output_mask: Sequence[bool],
    reserve: Any,
    axis: int = 1,
) -> tuple[Any, Any, Any]:
    statistics = (running_mean, running_var, save_mean, save_var)
    return batch_norm_backward(grad_out, input, weight, *statistics, update, eps, output_mask, axis)


# Those that take a `Train` function.
TRAINING = frozenset({
    "aten._native_batch_norm_legit_functional.default", "aten._native_batch_norm_legit.no_stats",
    "aten._batch_norm_with_update_functional.default", "aten.native_batch_norm.default",
})  # fmt: skip
# Operation -> function, for channels last.
BATCH_NORMS: dict[str, Callable[..., Any]] = {
    "aten._native_batch_norm_legit_functional.default": batch_norm_functional,
    "aten._native_batch_norm_legit.no_stats": batch_norm_no_stats,
    "aten._native_batch_norm_legit_no_training.default": batch_norm_no_training,
    "aten._batch_norm_with_update_functional.default": batch_norm_with_update,
    "aten._batch_norm_no_update.default": batch_norm_no_update,
    "aten.native_batch_norm.default": native_batch_norm,
    "aten.native_batch_norm_backward.default": batch_norm_backward,
    "aten.batch_norm_backward.default": batch_norm_backward_with_reserve,
}


@lowering("aten.native_layer_norm.default")
def layer_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> tuple[Any, Any, Any]:
    x, w, b = _wide(input, weight, bias)
    over = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    mean = jnp.mean(x, over, keepdims=True)
    rstd = lax.rsqrt(jnp.mean(jnp.square(x - mean), over, keepdims=True) + eps)
    y = (x - mean) * rstd
    y = y if w is None else y * w
    return (y if b is None else y + b).astype(input.dtype), mean, rstd


@lowering("aten.native_layer_norm_backward.default")
def layer_norm_backward(
    grad_out: Any,
    input: Any,
    normalized_shape: Sequence[int],
    mean: Any,
    rstd: Any,
    weight: Any,
    bias: Any,
    output_mask: Sequence[bool],
) -> tuple[Any, Any, Any]:
    g, x, mean, rstd, w = _wide(grad_out, input, mean, rstd, weight)
    first = x.ndim - len(normalized_shape)
    inner, outer = tuple(range(first, x.ndim)), tuple(range(first))
    normal = (x - mean) * rstd
    input_grad = weight_grad = bias_grad = None
    if output_mask[0]:
        scaled = g if w is None else g * w
        along = normal * jnp.mean(scaled * normal, inner, keepdims=True)
        input_grad = rstd * (scaled - jnp.mean(scaled, inner, keepdims=True) - along)
        input_grad = input_grad.astype(input.dtype)
    if output_mask[1] and weight is not None:
        weight_grad = jnp.sum(g * normal, outer).astype(weight.dtype)
    if output_mask[2] and bias is not None:
        bias_grad = jnp.sum(g, outer).astype(bias.dtype)
    return input_grad, weight_grad, bias_grad


@lowering("aten.native_group_norm.default")
def group_norm(
    input: Any, weight: Any, bias: Any, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[Any, Any, Any]:
    x, w, b = _wide(input, weight, bias)
    groups = x.reshape(N, group, C // group * HxW)
    mean = jnp.mean(groups, 2)
    rstd = lax.rsqrt(jnp.mean(jnp.square(groups - mean[..., None]), 2) + eps)
    y = ((groups - mean[..., None]) * rstd[..., None]).reshape(input.shape)
    y = y if w is None else y * channels(w, x.ndim)
    y = y if b is None else y + channels(b, x.ndim)
    return y.astype(input.dtype), mean, rstd


@lowering("aten.native_group_norm_backward.default")
def group_norm_backward(
    grad_out: Any,
    input: Any,
    mean: Any,
    rstd: Any,
    weight: Any,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[Any, Any, Any]:
    g, x, mean, rstd, w = _wide(grad_out, input, mean, rstd, weight)
    parts = (N, group, C // group, HxW)
    g, x = g.reshape(parts), x.reshape(parts)
    normal = (x - mean[..., None, None]) * rstd[..., None, None]
    input_grad = weight_grad = bias_grad = None
    if output_mask[0]:
        scaled = g if w is None else g * w.reshape(1, group, -1, 1)
        along = normal * jnp.mean(scaled * normal, (2, 3), keepdims=True)
        input_grad = scaled - jnp.mean(scaled, (2, 3), keepdims=True) - along
        input_grad = (input_grad * rstd[..., None, None]).reshape(input.shape).astype(input.dtype)
    dtype = input.dtype if weight is None else weight.dtype
    if output_mask[1]:
        weight_grad = jnp.sum(g * normal, (0, 3)).reshape(C).astype(dtype)
    if output_mask[2]:
        bias_grad = jnp.sum(g, (0, 3)).reshape(C).astype(dtype)
    return input_grad, weight_grad, bias_grad


def _softmax_input(self: Any, half_to_float: bool) -> tuple[Any, Any]:
    return self.astype(opmath(self.dtype)), jnp.float32 if half_to_float else self.dtype


@lowering("aten._softmax.default")
def softmax(self: Any, dim: int, half_to_float: bool) -> Any:
    x, dtype = _softmax_input(self, half_to_float)
    return (jax.nn.softmax(x, dim) if x.ndim else jnp.ones_like(x)).astype(dtype)


@lowering("aten._log_softmax.default")
def log_softmax(self: Any, dim: int, half_to_float: bool) -> Any:
    x, dtype = _softmax_input(self, half_to_float)
    return (jax.nn.log_softmax(x, dim) if x.ndim else jnp.zeros_like(x)).astype(dtype)


@lowering("aten._safe_softmax.default")
def safe_softmax(self: Any, dim: int, dtype: Any = None) -> Any:
    """Compute softmax, with zeros where all of a row is masked by -inf."""
    x = self.astype(opmath(self.dtype))
    masked = jnp.all(x == -jnp.inf, dim, keepdims=True)
    return jnp.where(masked, 0, jax.nn.softmax(x, dim)).astype(dtype or self.dtype)


@lowering("aten._softmax_backward_data.default")
def softmax_backward(grad_output: Any, output: Any, dim: int, input_dtype: Any) -> Any:
    g, y = _wide(grad_output, output)
    if not g.ndim:
        return jnp.zeros((), input_dtype)
    return (y * (g - jnp.sum(g * y, dim, keepdims=True))).astype(input_dtype)


@lowering("aten._log_softmax_backward_data.default")
def log_softmax_backward(grad_output: Any, output: Any, dim: int, input_dtype: Any) -> Any:
    g, y = _wide(grad_output, output)
    if not g.ndim:
        return jnp.zeros((), input_dtype)
    return (g - jnp.exp(y) * jnp.sum(g, dim, keepdims=True)).astype(input_dtype)


@lowering("aten._weight_norm_interface.default")
def weight_norm(v: Any, g: Any, dim: int = 0) -> tuple[Any, Any]:
    """Scale v to the length g along each slice of this axis; return v's own lengths too."""
    wide, length = _wide(v, g)
    norm = jnp.sqrt(jnp.sum(jnp.square(wide), _other_axes(dim, v.ndim), keepdims=True))
    norm_dtype = jnp.float32 if g.dtype == jnp.bfloat16 else g.dtype  # as in torch
    return (wide * (length / norm)).astype(v.dtype), norm.astype(norm_dtype)


@lowering("aten._weight_norm_interface_backward.default")
def weight_norm_backward(
    grad_w: Any, saved_v: Any, saved_g: Any, saved_norms: Any, dim: int
) -> tuple[Any, Any]:
    gradient, v, g, norm = _wide(grad_w, saved_v, saved_g, saved_norms)
    along = jnp.sum(gradient * v, _other_axes(dim, v.ndim), keepdims=True) / norm
    v_grad = g / norm * (gradient - v * (along / norm))
    return v_grad.astype(saved_v.dtype), along.astype(saved_g.dtype)
