"""What dtypes become, and which two operands promote to: torch's rules, all of them."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from accbench.errors import RequestError

jnp = pytest.importorskip("jax.numpy")

from accbench.engines.jax.lowering import jax_dtype, to_jax  # noqa: E402
from accbench.engines.jax.lowering.dtypes import result_type  # noqa: E402
from benchmarks import against_torch  # noqa: E402

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
OPERANDS: list[Any] = [
    *(torch.ones(2, dtype=dtype) for dtype in DTYPES),
    *(torch.ones((), dtype=dtype) for dtype in DTYPES),
    *(True, 1, 1.0),
]


def test_every_pair_of_operands_promotes_as_in_torch() -> None:
    wrong = []
    for a, b in itertools.product(OPERANDS, OPERANDS):
        ours = result_type(*(to_jax(x) if isinstance(x, torch.Tensor) else x for x in (a, b)))
        theirs = torch.result_type(a, b)
        if ours != jax_dtype(theirs):
            wrong.append((a, b, ours, theirs))
    assert not wrong


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_keeps_its_values(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1, 3], [2, 100, 7]]).to(dtype)
    array = to_jax(tensor.t())
    assert array.shape == (3, 2)
    assert np.asarray(array, np.float64).tolist() == tensor.t().double().tolist()


def test_what_int32_cannot_hold_is_refused_where_it_comes_in() -> None:
    assert to_jax(torch.tensor([2**31 - 1])).dtype == jnp.int32
    with pytest.raises(RequestError, match="labels holds 0 to 2147483648.*JAX_ENABLE_X64"):
        to_jax(torch.tensor([0, 2**31]), "labels")


def test_complex_numbers_come_in_and_types_that_jax_lacks_are_refused() -> None:
    number = to_jax(torch.tensor([1 + 2j]))
    assert (number.dtype, complex(number[0])) == (jnp.complex64, 1 + 2j)
    with pytest.raises(RequestError, match="no torch.quint8"):
        to_jax(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8))


def _batch_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, torch.zeros(6), torch.ones(6), w, b, training=True)


def _layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x.movedim(1, -1), (6,), w, b)


def _group_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.group_norm(x, 2, w, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [_batch_norm, _layer_norm, _group_norm])
def test_norms_of_16_bits_with_parameters_of_32_round_no_gradient(
    dtype: torch.dtype, norm: Any
) -> None:
    """As torch's kernels do, whatever its decompositions note on a CPU."""
    torch.manual_seed(0)
    x = torch.randn(4, 6, 5, 5).to(dtype).requires_grad_()
    w, b = (torch.rand(6).requires_grad_() for _ in range(2))
    module = against_torch.Wrapped(norm, (x, w, b), {})
    by_torch = against_torch.eager(module)
    of_x, *others = against_torch.through_jax(module).gradients
    assert not against_torch.difference(of_x, by_torch.gradients[0], by_torch.gradients[0])
    for ours, eager in zip(others, by_torch.gradients[1:], strict=True):
        assert (ours != ours.to(dtype).float()).any()
        if norm is not _layer_norm:  # of which torch's own are rounded
            torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)
