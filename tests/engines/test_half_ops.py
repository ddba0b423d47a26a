"""Attention in 16 bits, as accbench spells it, beside the same in float64."""

import pytest
import torch

from accbench.engines import half_ops

SHAPE = (2, 3, 9, 9)  # as wide as it is long, so that values can be the identity


def exactly(query, key, value, scale, is_causal, kept, dropout_p):
    """By the definition, with these weights kept."""
    scores = scale * query @ key.mT
    if is_causal:
        scores = scores.masked_fill(torch.ones(SHAPE[-2:]).triu(1).bool(), float("-inf"))
    return (scores.softmax(-1) * kept / (1 - dropout_p)) @ value


@pytest.mark.parametrize("dtype", half_ops.TYPES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_attention_and_its_gradients(dtype, is_causal, dropout_p):
    torch.manual_seed(0)
    given = [torch.randn(SHAPE).to(dtype).requires_grad_() for _ in range(3)]
    gradient, scale = torch.randn(SHAPE).to(dtype), 0.3
    how = (scale, dropout_p, is_causal)
    torch.manual_seed(1)
    weights = half_ops.attention(*given[:2], torch.eye(9, dtype=dtype).expand(SHAPE), *how)
    kept = weights != 0 if dropout_p else torch.ones(SHAPE, dtype=torch.bool)
    if dropout_p:
        seen = torch.ones(SHAPE).tril().bool() if is_causal else torch.ones(SHAPE).bool()
        assert 0.15 < 1 - kept[seen].double().mean() < 0.35
    torch.manual_seed(1)
    out = half_ops.attention(*given, *how)
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    expected = exactly(*exact, scale, is_causal, kept.double(), dropout_p)
    own = torch.autograd.grad(out, given, gradient)
    right = torch.autograd.grad(expected, exact, gradient.double())
    for got, wanted in zip((out, *own), (expected, *right), strict=True):
        away = (got.double() - wanted).norm() / wanted.norm()
        assert away < 3 * torch.finfo(dtype).eps
