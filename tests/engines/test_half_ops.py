"""What accbench spells for 16 bits, beside the same in float64."""

import pytest
import torch
from torch.nn import functional

from accbench.engines.xla_common import half_attention, half_ops

SHAPE = (2, 3, 9, 9)  # as wide as it is long, so that values can be the identity


def exactly(query, key, value, scale, is_causal, kept, dropout_p):
    """By the definition, with these weights kept."""
    scores = scale * query @ key.mT
    if is_causal:
        scores = scores.masked_fill(torch.ones(SHAPE[-2:]).triu(1).bool(), float("-inf"))
    return (scores.softmax(-1) * kept / (1 - dropout_p)) @ value


@pytest.mark.parametrize("dtype", half_ops.HALF_DTYPES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_attention_and_its_gradients(dtype, is_causal, dropout_p):
    torch.manual_seed(0)
    given = [torch.randn(SHAPE).to(dtype).requires_grad_() for _ in range(3)]
    gradient, scale = torch.randn(SHAPE).to(dtype), 0.3
    how = (scale, dropout_p, is_causal)
    torch.manual_seed(1)
    weights = half_attention.attention(*given[:2], torch.eye(9, dtype=dtype).expand(SHAPE), *how)
    kept = weights != 0 if dropout_p else torch.ones(SHAPE, dtype=torch.bool)
    if dropout_p:
        seen = torch.ones(SHAPE).tril().bool() if is_causal else torch.ones(SHAPE).bool()
        assert 0.15 < 1 - kept[seen].double().mean() < 0.35
    torch.manual_seed(1)
    out = half_attention.attention(*given, *how)
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    expected = exactly(*exact, scale, is_causal, kept.double(), dropout_p)
    own = torch.autograd.grad(out, given, gradient)
    right = torch.autograd.grad(expected, exact, gradient.double())
    for got, wanted in zip((out, *own), (expected, *right), strict=True):
        away = (got.double() - wanted).norm() / wanted.norm()
        assert away < 3 * torch.finfo(dtype).eps


SIZES = [((3, 3), (2, 2), (1, 1)), ((2, 2), (2, 2), (0, 0)), ((3, 2), (1, 3), (1, 0))]


def pooled(batch, weight_C, bias_C, sizes, in_place):
    """BatchNorm, ReLU and max-pooling as half_ops has them, one after the other."""
    size, stride, padding = sizes
    normal = half_ops.batch_norm(batch, weight_C, bias_C, None, None, 0.1, 1e-5)
    active = half_ops.relu_in_place(normal) if in_place else half_ops.relu(normal)
    return half_ops.max_pool2d(active, size, stride, padding), active


@pytest.mark.parametrize("dtype", half_ops.HALF_DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("in_place", [False, True])
def test_batch_norm_relu_and_max_pooling_and_their_gradients(dtype, sizes, in_place):
    torch.manual_seed(0)
    batch = torch.randn(6, 4, 11, 10).to(dtype).requires_grad_()
    # Two of them turn the order of what is pooled around.
    vectors = [torch.tensor([1.5, -0.7, 0.2, -2.0]), torch.tensor([0.3, 0.6, -0.1, 0.0])]
    weight_C, bias_C = (vector.requires_grad_() for vector in vectors)
    out, active = pooled(batch, weight_C, bias_C, sizes, in_place)
    # Rounding keeps the order, so not one value may differ from what eager pools.
    size, stride, padding = sizes
    assert torch.equal(out, torch.max_pool2d(active.detach(), size, stride, padding))

    exact = [one.detach().double().requires_grad_() for one in (batch, weight_C, bias_C)]
    normal = functional.batch_norm(exact[0], None, None, *exact[1:], training=True)
    right = torch.max_pool2d(normal.relu(), size, stride, padding)
    gradient = torch.randn_like(right).to(dtype)
    # The ReLU's result may have other uses, too.
    (out * gradient).sum().add((active.float() ** 2).sum()).backward()
    (right * gradient.double()).sum().add((normal.relu() ** 2).sum()).backward()
    for got, wanted in zip((batch, weight_C, bias_C), exact, strict=True):
        away = (got.grad.double() - wanted.grad).norm() / wanted.grad.norm()
        assert away < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("shape", [(64, 3), (48, 3, 20), (96, 3, 8, 8), (5, 3, 70, 70)])
def test_batch_norms_sums_of_few_and_of_many_values(shape):
    torch.manual_seed(0)
    batch = (torch.randn(shape) * 3 + 2).half().requires_grad_()
    weight_C, bias_C = torch.randn(3).requires_grad_(), torch.randn(3).requires_grad_()
    mean_C, var_C = torch.zeros(3), torch.ones(3)
    out = half_ops.batch_norm(batch, weight_C, bias_C, mean_C, var_C, 0.1, 1e-5)
    exact = [one.detach().double().requires_grad_() for one in (batch, weight_C, bias_C)]
    means = [torch.zeros(3).double(), torch.ones(3).double()]
    right = functional.batch_norm(exact[0], *means, *exact[1:], training=True, momentum=0.1)
    gradient = torch.randn(shape).half()
    out.backward(gradient)
    right.backward(gradient.double())
    pairs = [(out, right), (mean_C, means[0]), (var_C, means[1])]
    pairs += [(a.grad, b.grad) for a, b in zip((batch, weight_C, bias_C), exact, strict=True)]
    for got, wanted in pairs:
        away = (got.double() - wanted).norm() / wanted.norm()
        eps = torch.finfo(got.dtype).eps
        assert away < (eps if got.dtype is torch.float16 else 50 * eps)
