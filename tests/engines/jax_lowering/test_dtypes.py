"""What dtypes become, and which two operands promote to: torch's rules, all of them."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from accbench.errors import RequestError

jnp = pytest.importorskip("jax.numpy")

from accbench.engines.jax.lowering import jax_dtype, to_jax  # noqa: E402
from accbench.engines.jax.lowering.dtypes import result_type  # noqa: E402

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


def test_complex_numbers_are_refused() -> None:
    with pytest.raises(RequestError, match="no torch.complex64"):
        to_jax(torch.ones(2, dtype=torch.complex64))
