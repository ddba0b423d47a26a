"""Rounding as other programs would do it."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from accbench.comparing import roundings

NORMS = {
    "batch": (lambda: nn.BatchNorm2d(6), (4, 6, 3, 3)),
    "batch, no statistics": (lambda: nn.BatchNorm1d(6, track_running_stats=False), (4, 6)),
    "layer": (lambda: nn.LayerNorm([3, 3]), (4, 6, 3, 3)),
    "group": (lambda: nn.GroupNorm(2, 6), (4, 6, 3, 3)),
    "group, plain": (lambda: nn.GroupNorm(2, 6, affine=False), (4, 6)),
}


def _passed(norm: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output, gradients of a sum of squares, buffers."""
    x = x.clone().requires_grad_()
    out = norm(x)
    (out * torch.arange(out.numel()).view(out.shape).sin()).sum().backward()
    of_parameters = [p.grad for p in norm.parameters()]
    return [out.detach(), x.grad, *of_parameters, *(b.float() for b in norm.buffers())]


def _both(name: str, mean: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    build, shape = NORMS[name]
    x = mean + torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = []
    for other in (False, True):
        torch.manual_seed(0)
        norm = build()
        for parameter in norm.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)
        if other:
            with roundings.norms_with_xla_variance(None):
                found.append(_passed(norm, x))
        else:
            found.append(_passed(norm, x))
    return found[0], found[1]


@pytest.mark.parametrize("name", NORMS)
def test_norms_are_torchs_but_for_rounding(name):
    for own, other in zip(*_both(name, mean=0.0), strict=True):
        assert torch.allclose(own, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NORMS)
def test_norms_lose_what_a_large_mean_hides(name):
    """E[x^2] - E[x]^2 of a variance of 1 around 100 is off by some 1e-3."""
    own, other = (found[0] for found in _both(name, mean=100.0))
    off = float((own - other).norm() / own.norm())
    assert 1e-5 < off < 1e-1


def test_norms_are_put_back_and_stay_as_they_are_under_autocast_and_in_evaluation():
    before = functional.batch_norm, functional.layer_norm, functional.group_norm
    norm, x = nn.BatchNorm1d(3).eval(), 100 + torch.randn(4, 3)
    expected = norm(x)
    with roundings.norms_with_xla_variance(None):
        assert functional.batch_norm is not before[0]
        assert torch.equal(norm(x), expected)
    assert (functional.batch_norm, functional.layer_norm, functional.group_norm) == before
    with roundings.norms_with_xla_variance(torch.bfloat16):
        assert functional.batch_norm is before[0]


@pytest.mark.parametrize(
    ("dtype", "most"),
    [(None, 5 * 2.0**-24), (torch.bfloat16, 2.0**-12), (torch.float16, 2.0**-15)],
)
def test_weights_are_off_by_roundings_that_all_ranks_share(dtype, most):
    weights = {"w": torch.randn(100, 10), "zero": torch.zeros(3)}
    drawn = roundings.perturbed(weights, dtype, seed=1)
    off = (drawn["w"] - weights["w"]).abs() / weights["w"].abs()
    assert 0.2 * most < off.max() <= most
    assert drawn["w"].dtype is torch.float32
    assert torch.equal(drawn["zero"], weights["zero"])
    assert torch.equal(drawn["w"], roundings.perturbed(weights, dtype, seed=1)["w"])
    assert not torch.equal(drawn["w"], roundings.perturbed(weights, dtype, seed=2)["w"])
