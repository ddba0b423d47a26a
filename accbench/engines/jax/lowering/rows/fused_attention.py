"""Attention by JAX's own function, which on an NVIDIA GPU calls cuDNN's kernels.

They keep the scores on the chip, where products, softmax and products again write them to memory.
Captured only where `Rules.attention_by` names how; otherwise attention is decomposed.
"""

from typing import Any

import jax
import jax.numpy as jnp

from accbench.engines.jax.lowering.context import Context
from accbench.engines.jax.lowering.table import lowering


@lowering("accbench.fused_attention.default", context=True)
def attention(
    context: Context, query: Any, key: Any, value: Any, is_causal: bool, scale: float
) -> Any:
    """Compute softmax(scale * query key^T) value of (N, heads, length, size) arrays."""
    # As for a gradient: the backward pass asks for the same, and XLA computes it once.
    out, _ = _attend(context, query, key, value, is_causal, scale)
    return out


@lowering("accbench.fused_attention_backward.default", context=True)
def attention_backward(
    context: Context, grad_out: Any, query: Any, key: Any, value: Any, is_causal: bool, scale: float
) -> Any:
    """Return the gradients of query, key and value."""
    _, gradients = _attend(context, query, key, value, is_causal, scale)
    return gradients(grad_out)


def _attend(
    context: Context, query: Any, key: Any, value: Any, is_causal: bool, scale: float
) -> tuple[Any, Any]:
    """Return attention's result, and the function of its gradients."""
    implementation: Any = context.rules.attention_by
    lengths: dict[str, Any] = {}
    if any(array.shape[-2] % 2 for array in (query, key)):
        lengths = {
            name: jnp.full(array.shape[0], array.shape[-2], jnp.int32)
            for name, array in (("query_seq_lengths", query), ("key_value_seq_lengths", key))
        }

    def attend(*qkv: Any) -> Any:
        # JAX has the length before the heads, as projections give and take them.
        out = jax.nn.dot_product_attention(
            *(_with_even_length(jnp.swapaxes(array, 1, 2)) for array in qkv), scale=scale,
            is_causal=is_causal, implementation=implementation, **lengths,
        )  # fmt: skip
        return jnp.swapaxes(out[:, : query.shape[-2]], 1, 2)

    return jax.vjp(attend, query, key, value)


def _with_even_length(array: Any) -> Any:
    """Add zeros to (N, length, heads, size) of an odd length, which cuDNN has no gradients for."""
    return jnp.pad(array, ((0, 0), (0, array.shape[1] % 2), (0, 0), (0, 0)))
