"""Complex numbers: real and imaginary parts, and Fourier transforms."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from accbench.engines.jax.lowering.dtypes import is_complex
from accbench.engines.jax.lowering.table import lowering


@lowering("aten.view_as_real.default", "aten.view_as_real_copy.default")
def view_as_real(self: Any) -> Any:
    return jnp.stack([self.real, self.imag], -1)


@lowering("aten.view_as_complex.default", "aten.view_as_complex_copy.default")
def view_as_complex(self: Any) -> Any:
    return lax.complex(self[..., 0], self[..., 1])


@lowering("aten.complex.default", pointwise=True)
def complex_(real: Any, imag: Any) -> Any:
    return lax.complex(*jnp.broadcast_arrays(real, imag))


@lowering("aten.polar.default", pointwise=True)
def polar(abs: Any, angle: Any) -> Any:
    return lax.complex(*jnp.broadcast_arrays(abs * jnp.cos(angle), abs * jnp.sin(angle)))


@lowering(
    "aten._conj.default", "aten._conj_physical.default", "aten.conj_physical.default",
    "aten._conj_copy.default", pointwise=True,
)  # fmt: skip
def conj(self: Any) -> Any:
    return self.conj() if is_complex(self.dtype) else self


@lowering("aten._neg_view.default", "aten._neg_view_copy.default", pointwise=True)
def neg_view(self: Any) -> Any:
    return -self


@lowering("aten.resolve_conj.default", "aten.resolve_neg.default", pointwise=True)
def resolved(self: Any) -> Any:
    return self


@lowering("aten.real.default", pointwise=True)
def real(self: Any) -> Any:
    return self.real if is_complex(self.dtype) else self


@lowering("aten.imag.default", pointwise=True)
def imag(self: Any) -> Any:
    return self.imag


@lowering("aten.angle.default", pointwise=True)
def angle(self: Any) -> Any:
    return jnp.angle(self)


def _scale(normalization: int, num: int) -> float:
    """Return the factor of torch's `fft_norm_mode`: 1, 1 / sqrt(length) or 1 / length."""
    return (1.0, 1 / math.sqrt(num), 1 / num)[normalization]


def _scaled(array: Any, normalization: int, num: int) -> Any:
    scale = _scale(normalization, num)
    return array if scale == 1.0 else array * jnp.asarray(scale, array.dtype)


def _length(self: Any, dim: Sequence[int]) -> int:
    return math.prod(self.shape[d] for d in dim)


def _transform(self: Any, dim: Sequence[int], forward: bool) -> Any:
    """Compute the transform over some axes, without a factor."""
    for axis in dim:
        self = jnp.fft.fft(self, axis=axis) if forward else _inverse(self, axis)
    return self


def _inverse(self: Any, axis: int) -> Any:
    return jnp.fft.ifft(self, axis=axis, norm="forward")


@lowering("aten._fft_c2c.default")
def fft_c2c(self: Any, dim: Sequence[int], normalization: int, forward: bool) -> Any:
    return _scaled(_transform(self, dim, forward), normalization, _length(self, dim))


@lowering("aten._fft_r2c.default")
def fft_r2c(self: Any, dim: Sequence[int], normalization: int, onesided: bool) -> Any:
    if onesided:
        *others, last = dim
        spectrum = _transform(jnp.fft.rfft(self, axis=last), others, True)
    else:
        spectrum = _transform(self + 0j, dim, True)
    return _scaled(spectrum, normalization, _length(self, dim))


@lowering("aten._fft_c2r.default")
def fft_c2r(self: Any, dim: Sequence[int], normalization: int, last_dim_size: int) -> Any:
    *others, last = dim
    signal = _transform(self, others, False)
    signal = jnp.fft.irfft(signal, n=last_dim_size, axis=last, norm="forward")
    return _scaled(signal, normalization, _length(signal, dim))
