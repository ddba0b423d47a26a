"""Sums, means and maxima of bags of embeddings (`torch.nn.EmbeddingBag`)."""

from typing import Any

import jax
import jax.numpy as jnp

from accbench.engines.jax.lowering.context import Context
from accbench.engines.jax.lowering.dtypes import opmath
from accbench.engines.jax.lowering.table import lowering

SUM, MEAN, MAX = 0, 1, 2


def _bag_sizes(bags: Any, is_counted: Any, num_bags: int, dtype: Any) -> Any:
    return jnp.zeros((num_bags,), dtype).at[bags].add(is_counted.astype(dtype))


def _bags(indices: Any, offsets: Any) -> Any:
    """Return the bag of each index."""
    positions = jnp.arange(indices.shape[0])
    return (jnp.searchsorted(offsets, positions, side="right") - 1).astype(indices.dtype)


@lowering("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default", context=True)
def embedding_bag(
    context: Context,
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Any, Any, Any, Any]:
    """Compute the bags, and what the gradient needs.

    weight (rows, width), indices (n,), offsets (bags,) -> (bags, width), each index's bag, the
    bags' sizes, and the index of each maximum.
    """
    begins = offsets[:-1] if include_last_offset else offsets
    num_bags, dtype = begins.shape[0], opmath(weight.dtype)
    bags = _bags(indices, begins)
    is_counted = indices != padding_idx
    rows = jnp.take(weight, indices, axis=0, mode="clip").astype(dtype)
    sizes = _bag_sizes(bags, is_counted, num_bags, indices.dtype)
    # torch leaves some of these empty where its own CPU kernel does not need them.
    fake_values = context.node.meta["val"]
    saved = [jnp.zeros(v.shape, indices.dtype) for v in fake_values[1:]]
    saved = [bags if saved[0].size else saved[0], sizes if saved[1].size else saved[1], saved[2]]
    if mode == MAX:
        maxima, indices_of_max = _bag_maxima(rows, is_counted, bags, num_bags, indices)
        return maxima.astype(weight.dtype), saved[0], saved[1], indices_of_max
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.astype(dtype)[:, None]
    rows = jnp.where(is_counted[:, None], rows, 0)
    summed = jax.ops.segment_sum(rows, bags, num_bags)
    if mode == MEAN:
        summed = summed / jnp.maximum(sizes, 1).astype(dtype)[:, None]
    return summed.astype(weight.dtype), saved[0], saved[1], saved[2]


def _bag_maxima(
    rows: Any, is_counted: Any, bags: Any, num_bags: int, indices: Any
) -> tuple[Any, Any]:
    rows = jnp.where(is_counted[:, None], rows, -jnp.inf)
    best = jax.ops.segment_max(rows, bags, num_bags)
    first = jnp.where(rows == best[bags], jnp.arange(rows.shape[0])[:, None], rows.shape[0])
    position = jax.ops.segment_min(first, bags, num_bags)
    filled = jnp.isfinite(best)
    indices_of_max = jnp.take(
        indices, jnp.clip(position, 0, max(rows.shape[0] - 1, 0)), mode="clip"
    )
    return jnp.where(filled, best, 0), jnp.where(filled, indices_of_max, -1)


@lowering("aten._embedding_bag_dense_backward.default")
def embedding_bag_backward(
    grad: Any,
    indices: Any,
    offset2bag: Any,
    bag_size: Any,
    maximum_indices: Any,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Any,
    padding_idx: int = -1,
) -> Any:
    wide = grad.astype(opmath(grad.dtype))
    zeros = jnp.zeros((num_weights, grad.shape[-1]), wide.dtype)
    if mode == MAX:
        # Bags without elements have -1 for the index of their maximum.
        rows = jnp.where(maximum_indices < 0, num_weights, maximum_indices)
        columns = jnp.arange(grad.shape[-1])[None]
        return zeros.at[rows, columns].add(wide, mode="drop").astype(grad.dtype)
    grads = wide[offset2bag]
    if mode == MEAN:
        grads = grads / jnp.maximum(bag_size, 1).astype(wide.dtype)[offset2bag][:, None]
    if per_sample_weights is not None:
        grads = grads * per_sample_weights.astype(wide.dtype)[:, None]
    if scale_grad_by_freq:
        counts = jnp.zeros((num_weights,), wide.dtype).at[indices].add(1)
        grads = grads / counts[indices][:, None]
    grads = jnp.where((indices == padding_idx)[:, None], 0, grads)
    return zeros.at[indices].add(grads).astype(grad.dtype)


@lowering("aten._embedding_bag_per_sample_weights_backward.default")
def per_sample_weights_backward(
    grad: Any,
    weight: Any,
    indices: Any,
    offsets: Any,
    offset2bag: Any,
    mode: int,
    padding_idx: int = -1,
) -> Any:
    wide = grad.astype(opmath(grad.dtype))[_bags(indices, offsets)]
    rows = jnp.take(weight, indices, axis=0, mode="clip").astype(wide.dtype)
    products = jnp.where(indices == padding_idx, 0, jnp.sum(wide * rows, -1))
    return products.astype(grad.dtype)


@lowering("aten._embedding_bag_backward.default")
def embedding_bag_backward_of(
    grad: Any,
    indices: Any,
    offsets: Any,
    offset2bag: Any,
    bag_size: Any,
    maximum_indices: Any,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Any,
    padding_idx: int = -1,
) -> Any:
    bags = _bags(indices, offsets)
    is_counted = indices != padding_idx
    return embedding_bag_backward(
        grad,
        indices,
        bags,
        _bag_sizes(bags, is_counted, grad.shape[0], indices.dtype),
        maximum_indices,
        num_weights,
        scale_grad_by_freq,
        mode,
        per_sample_weights,
        padding_idx,
    )
