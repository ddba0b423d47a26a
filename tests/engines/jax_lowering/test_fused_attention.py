"""Attention as one operation: what is captured so, and what JAX computes for it."""

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

jax = pytest.importorskip("jax")

from accbench.engines.common import cuda_autocast  # noqa: E402
from accbench.engines.jax import fused_attention, fused_ops, lowering  # noqa: E402
from benchmarks import against_torch  # noqa: E402


def _qkv(*sizes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size).to(dtype).requires_grad_() for size in sizes]


@pytest.mark.parametrize(
    ("lengths", "is_causal"), [((6, 6), False), ((7, 7), True), ((5, 8), False), ((8, 3), False)]
)
def test_attention_and_its_gradients_are_torchs(lengths: tuple[int, int], is_causal: bool) -> None:
    """Of odd lengths too, for which zeros are added that no query sees."""
    queries, keys = ((2, 3, length, 8) for length in lengths)
    qkv = _qkv(queries, keys, keys)
    assert fused_attention.supports(*qkv, is_causal)
    rules = lowering.Rules(attention_by="xla")
    assert not against_torch.check(
        fused_attention.attention, (*qkv, is_causal, 0.3), {}, rules=rules
    )


SHAPE = (2, 4, 6, 8)


@pytest.mark.parametrize(
    ("sizes", "how", "is_kept"),
    [
        ((SHAPE, SHAPE, SHAPE), {"is_causal": True}, True),
        ((SHAPE, (2, 2, 6, 8), (2, 2, 6, 8)), {"enable_gqa": True}, True),
        ((SHAPE, SHAPE, SHAPE), {"dropout_p": 0.1}, False),
        ((SHAPE, SHAPE, SHAPE), {"attn_mask": torch.ones(6, 6, dtype=torch.bool)}, False),
        (((2, 4, 6, 12),) * 3, {}, False),
        (((2, 4, 6, 136),) * 3, {}, False),
        (((4, 6, 8),) * 3, {}, False),
        ((SHAPE, (2, 4, 5, 8), (2, 4, 5, 8)), {"is_causal": True}, False),
    ],
    ids=["causal", "grouped queries", "dropout", "mask", "size 12", "size 136", "three axes",
         "causal of two lengths"],
)  # fmt: skip
def test_what_cudnn_has_is_captured_as_one_operation(sizes: Any, how: Any, is_kept: bool) -> None:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        mask = {"attn_mask": query.new_zeros(6, 6)} if "attn_mask" in how else {}
        with cuda_autocast.autocast(torch.bfloat16, fused_ops.overrides(keeps_attention=True)):
            out = F.scaled_dot_product_attention(query, key, value, **{**how, **mask})
        return out, *torch.autograd.grad(out.float().sum(), (query, key, value))

    qkv = _qkv(*sizes, dtype=torch.float32)
    with mock.patch.dict(os.environ):  # torch's tracing leaves a folder's name there
        graph = make_fx(attend, tracing_mode="fake")(*qkv)
    kept = [str(node.target) for node in graph.graph.nodes if "fused_attention" in str(node.target)]
    ours = ["accbench.fused_attention.default", "accbench.fused_attention_backward.default"]
    assert kept == (ours if is_kept else [])


def test_cudnn_is_asked_for_where_the_gpu_has_it() -> None:
    from accbench.engines.jax import runtime
    from accbench.engines.jax.options import JaxOptions

    def found(device: str, capability: str | None, **options: Any) -> str | None:
        given = JaxOptions(**options)
        return runtime.lowering_rules(device, given, compute_capability=capability).attention_by

    assert found("cuda", "9.0") == found("cuda", None) == found("cuda", "8.0") == "cudnn"
    assert found("cuda", "7.5") is found("cuda", "9.0", attention="xla") is None
    assert found("cpu", None) is None
    assert found("cuda", "7.5", attention="cudnn") == "cudnn"
