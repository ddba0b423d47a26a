"""Ring attention of `accbench.distributed.ring_attention`, by permutes along the mesh's axis `cp`.

One program serves all ranks, and it is as long for any number of them. So each rank multiplies as
many queries with as many keys in every round. Of its positions a rank has an early chunk, number 0,
and a late one, number 1. Under a causal mask the late queries of a rank see the early keys of every
other rank, and beside these

- of ranks before it the early queries see the early keys,
- of ranks behind it the late queries see the late keys,

which is a second pair of chunks of one number. Of the rank's own keys each chunk sees a triangle.

Arrays are (C, N, G, R, T, D): C chunks of T positions, and R heads of queries for each of G heads
of keys and values; those of keys and values are without R. Products are of the queries' type, and
what is summed is in float32, or in a wider type of theirs.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from accbench.engines.jax.lowering.dtypes import opmath
from accbench.engines.jax.lowering.rows.collectives import CP_AXIS, computed_zero
from accbench.engines.jax.lowering.table import lowering

_MAX_SCORES = 1 << 24
"""Scores that are in memory at a time: 64 MiB in float32."""


class _Pairs(NamedTuple):
    """Chunks of queries, and the chunks of keys that they see, one each."""

    queries: Sequence[Any]
    keys: Sequence[Any]
    is_triangle: bool = False
    """Mask all but its first t keys for the t-th query of a chunk."""


@lowering("accbench.ring_attention.default")
def ring_attention(
    q: Any, k: Any, v: Any, group_name: str, is_causal: bool, scale: float
) -> tuple[Any, Any]:
    """Attend to the keys of all ranks -> (N, H, T, E), and log-sum-exps of scores (N, H, T)."""
    queries = _grouped(_chunked(q, is_causal), k.shape[1])
    wide = opmath(q.dtype)

    def attend_to(totals: Any, kv: Any, pairs: _Pairs) -> Any:
        new = _attend(queries, kv, pairs, scale)
        for index, chunk in enumerate(pairs.queries):
            before = [lax.dynamic_index_in_dim(x, chunk, keepdims=False) for x in totals]
            merged = _merged(*before, *(x[index] for x in new))
            totals = [
                lax.dynamic_update_index_in_dim(x, part, chunk, 0)
                for x, part in zip(totals, merged, strict=True)
            ]
        return totals

    nothing = [
        jnp.zeros((*queries.shape[:-1], v.shape[-1]), wide),
        jnp.full(queries.shape[:-1], -jnp.inf, wide),
    ]
    kv = [_chunked(x, is_causal) for x in (k, v)]
    out, log_sums = _go_round(kv, nothing, attend_to, lambda totals: totals, is_causal)
    out = _joined(out, (*q.shape[:-1], v.shape[-1]))
    return out.astype(q.dtype), _joined(log_sums, q.shape[:-1])


@lowering("accbench.ring_attention_backward.default")
def ring_attention_backward(
    grad_out: Any, q: Any, k: Any, v: Any, out: Any, log_sums: Any, group_name: str,
    is_causal: bool, scale: float,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Return the gradients of q, k and v."""
    wide = log_sums.dtype
    # XLA would keep the scores and the keys received of the forward pass for this one, were they of
    # the same numbers.
    q, k, v = (x - computed_zero(grad_out).astype(x.dtype) for x in (q, k, v))
    # What the softmax takes from all weights' gradients of a query alike.
    means = (grad_out.astype(wide) * out.astype(wide)).sum(-1)
    of_queries = [
        _grouped(_chunked(x, is_causal), k.shape[1]) for x in (grad_out, q, log_sums, means)
    ]
    kv = [_chunked(x, is_causal) for x in (k, v)]

    def add(sums: Any, kv: Any, pairs: _Pairs) -> Any:
        new = _gradients(of_queries, kv, pairs, scale)
        chunks = pairs.queries, pairs.keys, pairs.keys
        return [_added(*of_one) for of_one in zip(sums, chunks, new, strict=True)]

    def follow(sums: Any) -> Any:
        """Send the sums of keys and values after them: each rank adds its queries' part."""
        grad_q, *of_kv = sums
        return [grad_q, *_pass_on(of_kv)]

    nothing = [jnp.zeros(x.shape, wide) for x in (of_queries[1], *kv)]
    sums = follow(_go_round(kv, nothing, add, follow, is_causal))  # and back to their own rank
    return tuple(
        _joined(total, x.shape).astype(x.dtype) for total, x in zip(sums, (q, k, v), strict=True)
    )


def _go_round(
    kv: Any, totals: Any, visit: Callable[..., Any], next_round: Callable[[Any], Any],
    is_causal: bool,
) -> Any:  # fmt: skip
    """Visit the keys and values of all ranks, this one's first, the next ones under way meanwhile.

    Args:
        kv: this rank's.
        totals: results of no keys, to which each visit adds.
        visit: `visit(totals, kv, pairs) -> totals`.
        next_round: `next_round(totals) -> totals`, before each other rank's.
        is_causal: whether queries see the keys at their own and earlier positions alone.
    """
    last = lax.axis_size(CP_AXIS) - 1
    received = _pass_on(kv)
    for pairs in _own_pairs(is_causal):
        totals = visit(totals, kv, pairs)

    def visit_next(number: Any, carry: Any) -> Any:
        received, totals = carry
        sent = _pass_on(received)
        return sent, visit(next_round(totals), received, _pairs(number, is_causal))

    received, totals = lax.fori_loop(1, last, visit_next, (received, totals))
    return visit(next_round(totals), received, _pairs(last, is_causal))


def _own_pairs(is_causal: bool) -> list[_Pairs]:
    """Return the pairs of chunks of this rank alone."""
    return [_Pairs([0, 1], [0, 1], True), _Pairs([1], [0])] if is_causal else [_Pairs([0], [0])]


def _pairs(number: Any, is_causal: bool) -> _Pairs:
    """Return the pairs of chunks of this rank's queries and the keys that it has in a round."""
    if not is_causal:
        return _Pairs([0], [0])
    is_of_rank_behind = (number > lax.axis_index(CP_AXIS)).astype(jnp.int32)
    return _Pairs([1, is_of_rank_behind], [0, is_of_rank_behind])


def _pass_on(arrays: Sequence[Any]) -> list[Any]:
    """Send arrays to the next rank, and return those of the rank before."""
    size = lax.axis_size(CP_AXIS)
    ring = [(rank, (rank + 1) % size) for rank in range(size)]
    return [lax.ppermute(array, CP_AXIS, ring) for array in arrays]


def _attend(queries: Any, kv: Sequence[Any], pairs: _Pairs, scale: float) -> tuple[Any, Any]:
    """Return weighted values (C, N, G, R, T, E), and log-sum-exps of scores (C, N, G, R, T).

    Args:
        queries: all of this rank's, of which `pairs` names C chunks; likewise of all arrays.
        kv: keys and values.
        pairs: the chunks.
        scale: what products of queries and keys are multiplied by.
    """
    q, k, v = (*_taken([queries], pairs.queries), *_taken(kv, pairs.keys))

    def of_tile(carry: None, tile: Any) -> Any:
        first, q = tile
        scores = _scores(q, k, first, pairs, scale)
        largest = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - largest)
        total = weights.sum(-1, keepdims=True)
        out = _product("cngrts,cngse->cngrte", weights.astype(v.dtype), v) / total
        return None, (out, (largest + jnp.log(total))[..., 0])

    return _over_tiles(of_tile, None, [q], k)[1]


def _gradients(
    of_queries: Sequence[Any], kv: Sequence[Any], pairs: _Pairs, scale: float
) -> tuple[Any, Any, Any]:
    """Return the part of the gradients of queries, keys and values that these keys have.

    Args:
        of_queries: gradients of the result, queries, log-sum-exps of the scores of all keys, and
            what the softmax takes from the gradients of a query's weights.
        kv: keys and values.
        pairs: as `_attend` has it.
        scale: likewise.
    """
    tiled, (k, v) = _taken(of_queries, pairs.queries), _taken(kv, pairs.keys)

    def of_tile(carry: Any, tile: Any) -> Any:
        grad_k, grad_v = carry
        first, grad_out, q, log_sums, means = tile
        weights = jnp.exp(_scores(q, k, first, pairs, scale) - log_sums[..., None])
        grad_weights = _product("cngrte,cngse->cngrts", grad_out, v)
        grad_scores = (weights * (grad_weights - means[..., None]) * scale).astype(k.dtype)
        grad_q = _product("cngrts,cngsd->cngrtd", grad_scores, k)
        grad_k += _product("cngrts,cngrtd->cngsd", grad_scores, q)
        grad_v += _product("cngrts,cngrte->cngse", weights.astype(v.dtype), grad_out)
        return (grad_k, grad_v), grad_q

    zeros = tuple(jnp.zeros(x.shape, opmath(x.dtype)) for x in (k, v))
    of_kv, grad_q = _over_tiles(of_tile, zeros, tiled, k)
    return grad_q, *of_kv


def _over_tiles(
    function: Callable[..., Any], carry: Any, of_queries: Sequence[Any], k: Any
) -> tuple[Any, Any]:
    """Run a function on a few queries at a time.

    Args:
        function: `function(carry, (first, *of_queries)) -> (carry, of_queries)`; `first` is the
            number of the first of its queries in their chunks.
        carry: what it begins with.
        of_queries: arrays (C, N, G, R, T, ...).
        k: keys that all of them see, (C, N, G, S, D).
    """
    num_queries = of_queries[0].shape[4]
    num_scores = of_queries[0].size // of_queries[0].shape[-1] * k.shape[3]
    num_tiles = next(
        n for n in range(1, num_queries + 1)
        if n == num_queries or (num_queries % n == 0 and num_scores <= n * _MAX_SCORES)
    )  # fmt: skip
    if num_tiles == 1:
        return tuple(function(carry, (0, *of_queries)))
    num_rows = num_queries // num_tiles
    tiles = [
        jnp.moveaxis(x.reshape(*x.shape[:4], num_tiles, num_rows, *x.shape[5:]), 4, 0)
        for x in of_queries
    ]
    carry, outputs = lax.scan(function, carry, (num_rows * jnp.arange(num_tiles), *tiles))
    return carry, jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 4).reshape(*x.shape[1:5], num_queries, *x.shape[6:]), outputs
    )


def _scores(q: Any, k: Any, first: Any, pairs: _Pairs, scale: float) -> Any:
    scores = _product("cngrtd,cngsd->cngrts", q, k) * scale
    if not pairs.is_triangle:
        return scores
    rows = first + jnp.arange(q.shape[4])
    return jnp.where(rows[:, None] >= jnp.arange(k.shape[3]), scores, -jnp.inf)


def _product(formula: str, left: Any, right: Any) -> Any:
    """Multiply arrays of one type; what is summed is in a wider one."""
    return jnp.einsum(formula, left, right, preferred_element_type=opmath(left.dtype))


def _merged(out: Any, log_sums: Any, new_out: Any, new_log_sums: Any) -> tuple[Any, Any]:
    """Merge attention to some keys with that to others."""
    totals = jnp.logaddexp(log_sums, new_log_sums)
    before = out * jnp.exp(log_sums - totals)[..., None]
    return before + new_out * jnp.exp(new_log_sums - totals)[..., None], totals


def _taken(arrays: Sequence[Any], chunks: Sequence[Any]) -> list[Any]:
    """Return some chunks of arrays."""
    return [
        jnp.stack([lax.dynamic_index_in_dim(x, chunk, keepdims=False) for chunk in chunks])
        for x in arrays
    ]


def _added(total: Any, chunks: Sequence[Any], new: Any) -> Any:
    """Add to some chunks of an array, one after the other, for they may be the same."""
    for index, chunk in enumerate(chunks):
        before = lax.dynamic_index_in_dim(total, chunk, keepdims=False)
        total = lax.dynamic_update_index_in_dim(total, before + new[index], chunk, 0)
    return total


def _chunked(x: Any, is_causal: bool) -> Any:
    """Return (N, H, T, ...) as (C, N, H, T / C, ...)."""
    num_chunks = 2 if is_causal else 1
    chunked = x.reshape(*x.shape[:2], num_chunks, x.shape[2] // num_chunks, *x.shape[3:])
    return jnp.moveaxis(chunked, 2, 0)


def _grouped(x: Any, num_groups: int) -> Any:
    """Return (C, N, H, T, ...) as (C, N, G, R, T, ...)."""
    return x.reshape(*x.shape[:2], num_groups, -1, *x.shape[3:])


def _joined(x: Any, shape: Sequence[int]) -> Any:
    """Return chunks (C, N, ..., T, ...) as they were, (N, H, T, ...) of this shape."""
    flat = x.reshape(x.shape[0], *shape[:2], -1, *shape[3:])
    return jnp.moveaxis(flat, 0, 2).reshape(shape)
