"""Factorizations and solutions of linear systems, also those that torch's gradients need.

JAX reports no failure inside a compiled graph: `info` is zeros, and a matrix that cannot be
factorized gives NaNs.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy import linalg

from accbench.engines.jax.lowering.table import lowering


def _transpose(matrix: Any) -> Any:
    return jnp.swapaxes(matrix, -1, -2)


def _info(matrix: Any) -> Any:
    return jnp.zeros(matrix.shape[:-2], jnp.int32)


@lowering("aten.linalg_cholesky_ex.default")
def cholesky_ex(self: Any, upper: bool = False, check_errors: bool = False) -> tuple[Any, Any]:
    return cholesky(self, upper), _info(self)


@lowering("aten.cholesky.default")
def cholesky(self: Any, upper: bool = False) -> Any:
    factor = jnp.linalg.cholesky(_transpose(self) if upper else self)
    return _transpose(factor) if upper else factor


@lowering("aten.linalg_inv_ex.default")
def inv_ex(A: Any, check_errors: bool = False) -> tuple[Any, Any]:
    return jnp.linalg.inv(A), _info(A)


@lowering("aten.linalg_solve_triangular.default")
def solve_triangular(
    self: Any, B: Any, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    batch = jnp.broadcast_shapes(self.shape[:-2], B.shape[:-2])
    matrix = jnp.broadcast_to(self, (*batch, *self.shape[-2:]))
    rhs = jnp.broadcast_to(B, (*batch, *B.shape[-2:]))
    return jax.lax.linalg.triangular_solve(
        matrix, rhs, left_side=left, lower=not upper, unit_diagonal=unitriangular
    )


@lowering("aten._linalg_solve_ex.default")
def solve_ex(A: Any, B: Any, left: bool = True, check_errors: bool = False) -> tuple[Any, ...]:
    """Return the solution, and the factors that torch's gradient reads."""
    vector = B.ndim == A.ndim - 1 and B.shape == A.shape[:-1]
    rhs = B[..., None] if vector else B
    factors, pivots = linalg.lu_factor(A)
    solved = jnp.linalg.solve(A, rhs) if left else _solve_from_right(A, rhs)
    solution = solved[..., 0] if vector else solved
    return solution, factors, pivots.astype(jnp.int32) + 1, _info(A)


def _solve_from_right(A: Any, B: Any) -> Any:
    return _transpose(jnp.linalg.solve(_transpose(A), _transpose(B)))


@lowering("aten.linalg_lu_factor_ex.default")
def lu_factor_ex(A: Any, pivot: bool = True, check_errors: bool = False) -> tuple[Any, Any, Any]:
    factors, pivots, _ = jax.lax.linalg.lu(A)
    return factors, pivots.astype(jnp.int32) + 1, _info(A)  # torch counts rows from 1


@lowering("aten._linalg_det.default")
def det(A: Any) -> tuple[Any, Any, Any]:
    factors, pivots, _ = jax.lax.linalg.lu(A)
    return jnp.linalg.det(A), factors, pivots.astype(jnp.int32) + 1


@lowering("aten._linalg_slogdet.default")
def slogdet(A: Any) -> tuple[Any, Any, Any, Any]:
    sign, logarithm = jnp.linalg.slogdet(A)
    factors, pivots, _ = jax.lax.linalg.lu(A)
    return sign, logarithm, factors, pivots.astype(jnp.int32) + 1


@lowering("aten.linalg_lu_solve.default")
def lu_solve(LU: Any, pivots: Any, B: Any, left: bool = True, adjoint: bool = False) -> Any:
    batch = jnp.broadcast_shapes(LU.shape[:-2], B.shape[:-2])
    factors = jnp.broadcast_to(LU, (*batch, *LU.shape[-2:]))
    zero_based_pivots = jnp.broadcast_to(pivots, (*batch, *pivots.shape[-1:])) - 1
    rhs = jnp.broadcast_to(B, (*batch, *B.shape[-2:]))
    if left:
        return linalg.lu_solve((factors, zero_based_pivots), rhs, trans=int(adjoint))
    solved = linalg.lu_solve((factors, zero_based_pivots), _transpose(rhs), trans=int(not adjoint))
    return _transpose(solved)


@lowering("aten.linalg_matrix_exp.default")
def matrix_exp(self: Any) -> Any:
    return linalg.expm(self)


@lowering("aten.linalg_householder_product.default")
def householder_product(input: Any, tau: Any) -> Any:
    return jax.lax.linalg.householder_product(input, tau)


@lowering("aten.linalg_qr.default")
def qr(A: Any, mode: str = "reduced") -> Any:
    return jnp.linalg.qr(A, mode=mode)


@lowering("aten._linalg_eigh.default")
def eigh(A: Any, UPLO: str = "L", compute_v: bool = True) -> tuple[Any, Any]:
    lower = jnp.tril(A) if UPLO == "L" else jnp.triu(A)
    values, vectors = jnp.linalg.eigh(
        lower + _transpose(lower) - lower * jnp.eye(A.shape[-1], dtype=A.dtype),
        symmetrize_input=False,
    )
    return values, vectors


@lowering("aten._linalg_svd.default")
def svd(
    A: Any, full_matrices: bool = False, compute_uv: bool = True, driver: str | None = None
) -> tuple[Any, Any, Any]:
    if compute_uv:
        left, values, right = jnp.linalg.svd(A, full_matrices=full_matrices)
        return left, values, right
    empty = jnp.zeros((0,), A.dtype)
    return empty, jnp.linalg.svd(A, compute_uv=False), empty
