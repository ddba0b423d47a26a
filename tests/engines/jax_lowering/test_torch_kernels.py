"""Torch's kernels called from XLA's programs: the rules that are named after it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

jax = pytest.importorskip("jax")

from accbench.engines.jax import lowering  # noqa: E402
from accbench.engines.jax.lowering import torch_calls  # noqa: E402
from accbench.engines.jax.lowering.rows import torch_kernels  # noqa: E402
from benchmarks import against_torch  # noqa: E402

NAMES = ("float32", "bfloat16", "float16")
RULES = lowering.Rules(channels_last=True, torch_convolutions=NAMES, torch_products=NAMES)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that are small enough for a test."""
    for limit in ("_MIN_PRODUCT", "_MIN_PRODUCT_16_BIT"):
        monkeypatch.setattr(torch_kernels, limit, 1)


def _draw(dtype: torch.dtype, *sizes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size).to(dtype).requires_grad_() for size in sizes]


def _calls(times: int, **left: int) -> dict[str, int]:
    """So many calls of torch's, and none of XLA's own but what is left."""
    products = {"stablehlo.convolution": 0, "stablehlo.dot_general": 0}
    return {f"@{torch_calls.TARGET}(": times, **products, **left}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("function", "image", "kernel", "has_bias", "how"),
    [
        (F.conv2d, (3, 4, 9, 8), (6, 4, 3, 3), True, (2, 1)),
        (F.conv2d, (3, 4, 9, 8), (8, 1, 3, 3), False, (1, 1, 1, 4)),
        (F.conv2d, (3, 1, 1, 8), (6, 1, 1, 1), True, ()),
        (F.conv2d, (3, 4, 9, 8), (6, 4, 1, 1), True, (2,)),
        (F.conv2d, (3, 4, 9, 8), (6, 4, 1, 1), False, ((1, 3), 0)),
        (F.conv2d, (1, 40, 2, 2), (60, 40, 3, 3), True, (1, 1)),  # more kernel than image
        (F.conv2d, (2, 4, 17, 16), (6, 4, 3, 2), True, (1, 0, 2)),
        (F.conv1d, (3, 4, 9), (6, 4, 3), True, (2, 1)),
        (F.conv3d, (2, 4, 5, 6, 7), (6, 4, 3, 2, 1), False, (1, 1, 2)),
        (F.conv_transpose2d, (3, 4, 5, 6), (4, 6, 3, 3), True, (2, 1, 1)),
    ],
)
def test_convolutions(
    small_ones_too: None, dtype: torch.dtype, function: Any, image: Any, kernel: Any,
    has_bias: bool, how: Any,
) -> None:  # fmt: skip
    if dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        pytest.skip("this processor's oneDNN has no convolutions in float16")
    out = kernel[1] if function is F.conv_transpose2d else kernel[0]
    x, w, b = _draw(dtype, image, kernel, (out,))
    args = (x, w, b if has_bias else None, *how)
    # Forward, and both gradients at once, but where they are products.
    calls = _calls(3 if set(kernel[2:]) == {1} else 2)
    assert not against_torch.check(function, args, {}, rules=RULES, calls=calls)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("function", "left", "right"),
    [
        (torch.mm, (100, 64), (64, 96)),
        (lambda a, b: torch.mm(a.t(), b.t()), (64, 100), (96, 64)),
        (torch.bmm, (8, 50, 64), (8, 64, 60)),
        (lambda a, b: torch.matmul(a, b.transpose(-1, -2)), (2, 4, 50, 64), (2, 4, 60, 64)),
        (lambda a, b: torch.bmm(a.permute(0, 2, 1), b), (8, 64, 50), (8, 64, 60)),
        # Of the same shape whichever two axes are swapped.
        (lambda a, b: torch.bmm(a.transpose(0, 1), b), (64, 64, 64), (64, 64, 64)),
    ],
)
def test_products(
    small_ones_too: None, dtype: torch.dtype, function: Any, left: Any, right: Any
) -> None:
    args = _draw(dtype, left, right)
    assert not against_torch.check(function, args, {}, rules=RULES, calls=_calls(3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_of_products_have_their_bias_added(small_ones_too: None, dtype: torch.dtype) -> None:
    args = _draw(dtype, (100, 64), (96, 64), (96,))
    assert not against_torch.check(F.linear, args, {}, rules=RULES, calls=_calls(3))


@pytest.mark.parametrize(
    ("dtype", "rows", "times"),
    [
        (torch.float32, 512, 3), (torch.float32, 511, 0),  # 2^27 multiplications, and fewer
        (torch.bfloat16, 512, 0),  # XLA widens them, which is faster where there are no tiles
    ],
)  # fmt: skip
def test_large_products_are_torchs_and_others_xlas(
    dtype: torch.dtype, rows: int, times: int
) -> None:
    args = _draw(dtype, (rows, 512), (512, 512))
    rules = lowering.Rules(channels_last=True, torch_products=("float32",))
    calls = _calls(times, **{"stablehlo.dot_general": 3 - times})
    assert not against_torch.check(torch.mm, args, {}, rules=rules, calls=calls)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", ["no", "causal", "float", "bool"])
def test_attention(dtype: torch.dtype, masked: str) -> None:
    query, key, value = _draw(dtype, (2, 33, 4, 16), (2, 4, 40, 16), (2, 4, 40, 16))
    how = {
        "no": {"scale": 0.3},
        "causal": {"is_causal": True},
        "float": {"attn_mask": torch.randn(2, 1, 33, 40).to(dtype)},
        "bool": {"attn_mask": torch.rand(33, 40) > 0.3},
    }[masked]

    def attend(query: Any, key: Any, value: Any, **how: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(query.transpose(1, 2), key, value, **how)

    args = (query, key, value)
    assert not against_torch.check(attend, args, how, rules=RULES, calls=_calls(2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("spatial", "how", "by_torch"),
    [
        ((9, 8), {"kernel_size": 3, "stride": 2, "padding": 1}, True),
        ((9, 8), {"kernel_size": 3, "stride": 2, "ceil_mode": True}, True),
        ((7, 8), {"kernel_size": (2, 3), "stride": (1, 2), "padding": (1, 0)}, True),
        ((1, 2), {"kernel_size": 1}, True),
        ((9, 8), {"kernel_size": 3, "stride": 2, "dilation": 2}, False),  # with places of its own
        ((5, 6, 4), {"kernel_size": 2}, False),
    ],
)
def test_pools(dtype: torch.dtype, spatial: Any, how: Any, by_torch: bool) -> None:
    torch.manual_seed(0)
    x = torch.randint(0, 4, (3, 5, *spatial)).to(dtype)  # many are equal
    x[0, 0, 0, 0] = torch.nan
    rank = len(spatial)
    pool, convolve = (F.max_pool2d, F.max_pool3d)[rank - 2], (F.conv2d, F.conv3d)[rank - 2]
    one = torch.ones(5, 1, *(1,) * rank).to(dtype)

    def function(x: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
        return pool(convolve(x, one, groups=5), **how)

    rules = lowering.Rules(channels_last=True, pools_by_place=True, torch_pools=True)
    calls = {f"@{torch_calls.TARGET}(": 2 * by_torch}
    args = (x.requires_grad_(), one)
    assert not against_torch.check(function, args, {}, rules=rules, calls=calls)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("spatial", "of_channels", "by_torch"),
    [
        ((9, 8), ["weight", "bias"], NAMES),
        ((9, 8), ["weight"], NAMES),
        ((9, 8), [], ["float32"]),  # torch has statistics in 16 bits then
        ((1, 1), ["weight", "bias"], NAMES),
        ((7,), ["weight", "bias"], []),
        ((5, 6, 4), ["weight", "bias"], NAMES),
    ],
)
def test_norms(dtype: torch.dtype, spatial: Any, of_channels: list[str], by_torch: Any) -> None:
    (x,) = _draw(dtype, (3, 5, *spatial))
    vectors = _draw(torch.float32, *[(5,) for _ in of_channels])
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(spatial) - 1]
    one = torch.ones(5, 1, *(1,) * len(spatial)).to(dtype)

    def function(x: torch.Tensor, one: torch.Tensor, *vectors: Any) -> Any:
        given = dict(zip(of_channels, vectors, strict=True))
        moved = given.get("weight", torch.ones(5)).detach().clone(), torch.ones(5)
        stats = moved if "bias" in given else (None, None)
        return F.batch_norm(convolve(x, one, groups=5), *stats, **given, training=True), *stats

    rules = lowering.Rules(channels_last=True, torch_norms=NAMES)
    calls = {f"@{torch_calls.TARGET}(": 2 * (str(dtype).removeprefix("torch.") in by_torch)}
    assert not against_torch.check(function, (x, one, *vectors), {}, rules=rules, calls=calls)


def test_what_fails_in_a_call_is_told() -> None:
    @torch_calls.torch_call
    def failing(read: list[torch.Tensor], write: list[torch.Tensor]) -> None:
        raise ValueError("no such kernel")

    x = jax.numpy.ones(3)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ValueError: no such kernel"):
        jax.jit(lambda x: failing([x], x))(x)[0].block_until_ready()
