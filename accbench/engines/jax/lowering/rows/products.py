"""Matrix products. XLA sums products of 16-bit floats in float32."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from accbench.engines.jax.lowering.context import Context
from accbench.engines.jax.lowering.dtypes import opmath, result_type
from accbench.engines.jax.lowering.rows import torch_kernels
from accbench.engines.jax.lowering.table import lowering


@lowering("aten.mv.default", "aten.dot.default", "aten.matmul.default")
def product(self: Any, other: Any) -> Any:
    return jnp.matmul(self, other)


# On a GPU rows of 16-bit numbers should begin at 16 bytes, for its matrix units to load them.
_ALIGNMENT = 8
# Smaller products take as long either way.
_MIN_ALIGNED_FLOPS = 10**9


def _multiply(context: Context, self: Any, mat2: Any) -> Any:
    """Multiply matrices (..., m, k) and (..., k, n), with zeros at their edges where that pays.

    GPT-2's vocabulary of 50,257 makes rows that no matrix unit loads at full speed.
    """
    m, n = self.shape[-2], mat2.shape[-1]
    flops = 2 * math.prod(self.shape) * n
    if not context.rules.aligned_products or self.dtype.itemsize != 2 or flops < _MIN_ALIGNED_FLOPS:
        return jnp.matmul(self, mat2)
    product = jnp.matmul(_aligned(self), _aligned(mat2))
    if n % _ALIGNMENT:
        product = jax.lax.optimization_barrier(product)  # or XLA takes the zeros away again
    return product[..., :m, :n]


def _aligned(matrix: Any) -> Any:
    """Add zeros until rows and columns are multiples of the alignment."""
    edges = [(0, 0)] * (matrix.ndim - 2) + [(0, -size % _ALIGNMENT) for size in matrix.shape[-2:]]
    return jnp.pad(matrix, edges) if any(map(any, edges)) else matrix


@lowering("aten.mm.default", "aten.bmm.default", context=True)
def product_of_matrices(context: Context, self: Any, mat2: Any) -> Any:
    if torch_kernels.should_multiply(context, self, mat2):
        return torch_kernels.product(context, self, mat2)
    return _multiply(context, self, mat2)


def _add_scaled(self: Any, matrix: Any, alpha: Any, beta: Any) -> Any:
    """Compute beta * self + alpha * matrix in float32, and round once."""
    dtype = matrix.dtype
    wide = matrix.astype(opmath(dtype))
    if alpha != 1:
        wide = wide * jnp.asarray(alpha, wide.dtype)
    if beta == 0:  # self may hold NaNs, which torch then ignores
        return wide.astype(dtype)
    addend = self.astype(wide.dtype)
    return (wide + (addend if beta == 1 else addend * jnp.asarray(beta, wide.dtype))).astype(dtype)


@lowering("aten.addmm.default", context=True)
def addmm(context: Context, self: Any, mat1: Any, mat2: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    if torch_kernels.should_multiply(context, mat1, mat2) and self.ndim == 1 and alpha == beta == 1:
        return torch_kernels.product(context, mat1, mat2, bias=self)
    return _add_scaled(self, _multiply(context, mat1, mat2), alpha, beta)


@lowering("aten.baddbmm.default", context=True)
def baddbmm(
    context: Context, self: Any, batch1: Any, batch2: Any, beta: Any = 1, alpha: Any = 1
) -> Any:
    return _add_scaled(self, _multiply(context, batch1, batch2), alpha, beta)


@lowering("aten.addmv.default")
def addmv(self: Any, mat: Any, vec: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    return _add_scaled(self, jnp.matmul(mat, vec), alpha, beta)


@lowering("aten.addbmm.default")
def addbmm(self: Any, batch1: Any, batch2: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    dtype = result_type(batch1, batch2)
    return _add_scaled(self, jnp.einsum("bij,bjk->ik", batch1, batch2).astype(dtype), alpha, beta)


@lowering("aten._trilinear.default")
def trilinear(
    i1: Any,
    i2: Any,
    i3: Any,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Any:
    """Multiply three arrays, each with new axes at `expand`, and sum over `sumdim`."""
    ndim, letters = i1.ndim + len(expand1), "abcdefghij"
    names = [[letters[d] for d in range(ndim) if d not in e] for e in (expand1, expand2, expand3)]
    output_axes = "".join(letters[d] for d in range(ndim) if d not in sumdim)
    formula = f"{','.join(''.join(n) for n in names)}->{output_axes}"
    return jnp.einsum(formula, i1, i2, i3)
