"""Torch's tensors as JAX's arrays."""

import pytest
import torch

jax = pytest.importorskip("jax")

from accbench.engines.jax import arrays  # noqa: E402

HERE = [None, pytest.param(None, marks=pytest.mark.xla)]  # with today's torch, and with 2.8


@pytest.mark.parametrize("_", HERE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_dimensions_of_one_element_change_no_layout(_, dtype):
    """Or a step that was compiled for such a parameter would refuse its own result."""
    cpu = jax.devices("cpu")[0]
    for shape in ((1, 5, 8), (5, 1), (2, 1, 3, 1), (1, 1)):
        tensor = torch.arange(64)[: torch.Size(shape).numel()].reshape(shape).to(dtype)
        for array in (arrays.from_torch(tensor, cpu), arrays.copy_from_torch(tensor, cpu)):
            layout = array.format.layout
            assert layout.major_to_minor == tuple(range(len(shape)))
            assert torch.equal(arrays.to_torch(array), tensor)
