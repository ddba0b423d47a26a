"""Graphs run by the table: what is refused and how it is told, random numbers, rules."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from accbench.errors import RequestError

jax = pytest.importorskip("jax")

from accbench.engines.jax import lowering  # noqa: E402
from benchmarks import against_torch  # noqa: E402
from tests.conftest import HANG_S, ROOT  # noqa: E402

# Core ATen operations that a graph of a training step has no use for here.
WITHOUT_ROW = {
    "aten._local_scalar_dense.default": "a number for Python: capture refuses it",
    "aten.nonzero.default": "a size that depends on the data: capture refuses it",
    "aten._native_batch_norm_legit.default": "changes its arguments; captured as _functional",
    "aten.atan2.out": "writes to an argument; captured without",
    # Which torch counts as core once something else has been imported.
    "aten.resize_.default": "changes its argument; a graph that is captured has none",
    "aten.sym_storage_offset.default": "shapes that aren't known",
    "aten.sym_stride.int": "shapes that aren't known",
}


def core_operations() -> set[str]:
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten)]
    overloads = [
        getattr(packet, name)
        for packet in packets
        if isinstance(packet, torch._ops.OpOverloadPacket)
        for name in packet.overloads()
    ]
    return {str(op) for op in overloads if torch.Tag.core in op.tags}


def test_every_core_operation_has_a_row() -> None:
    core = core_operations()
    assert len(core) > 180
    assert core - set(lowering.operations()) == core & set(WITHOUT_ROW)


def graph_of(*operations: Any, shape: tuple[int, ...] = (2, 3)) -> fx.GraphModule:
    """Operations one after the other on one input, with the values that torch notes."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    value = torch.ones(shape)
    for operation in operations:
        node = graph.call_function(operation, (node,))
        value = operation(value)
        node.meta["val"] = value
    graph.output((node,))
    return fx.GraphModule(nn.Module(), graph)


def test_an_operation_without_a_row_is_named_with_its_place_and_the_way_to_add_it() -> None:
    graph_module = graph_of(torch.ops.aten.relu.default, torch.ops.aten.nonzero.default)
    node = [*graph_module.graph.nodes][2]
    node.meta["stack_trace"] = '  File "/home/me/net.py", line 7, in forward\n    x = x.nonzero()\n'
    assert lowering.missing(graph_module) == [
        "aten.nonzero.default (/home/me/net.py:7: x = x.nonzero())"
    ]
    with pytest.raises(RequestError) as error:
        lowering.run_graph(graph_module, [jax.numpy.ones((2, 3))])
    assert "/home/me/net.py:7" in str(error.value)
    assert "accbench.lowerings" in str(error.value)
    assert "\n" not in str(error.value)


def test_float64_is_refused_unless_a_rule_allows_float32_for_it() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten._to_copy.default, (x,), {"dtype": torch.float64})
    node.meta["val"] = torch.ones(2, dtype=torch.float64)
    graph.output((node,))
    graph_module = fx.GraphModule(nn.Module(), graph)
    ones = jax.numpy.ones(2)
    with pytest.raises(RequestError, match="gives float64"):
        lowering.run_graph(graph_module, [ones])
    rules = lowering.Rules(float64_as_float32=True)
    (out,) = lowering.run_graph(graph_module, [ones], rules=rules)
    assert out.dtype == "float32"


def test_a_row_that_is_wrong_about_a_shape_does_not_go_unnoticed() -> None:
    graph_module = graph_of(torch.ops.aten.relu.default)
    [*graph_module.graph.nodes][1].meta["val"] = torch.ones(3, 2)
    with pytest.raises(TypeError, match=r"aten.relu.default gave float32\[2, 3\]"):
        lowering.run_graph(graph_module, [jax.numpy.ones((2, 3))])


OUTSIDE = """
import accbench.engines.jax.lowering as lowering

@lowering.lowering("aten.nonzero_static.default")
def nonzero_static(self, *, size, fill_value=-1):
    return self
"""
ASKED = """
import accbench.engines.jax.lowering as lowering
print("aten.nonzero_static.default" in lowering.operations(), len(lowering.operations()) > 300)
"""


def test_a_package_outside_adds_a_row_by_an_entry_point(tmp_path: Path) -> None:
    (tmp_path / "my_rows.py").write_text(OUTSIDE)
    (tmp_path / "my_rows-1.dist-info").mkdir()
    (tmp_path / "my_rows-1.dist-info" / "METADATA").write_text("Name: my-rows\nVersion: 1\n")
    entry = "[accbench.lowerings]\nmine = my_rows\n"
    (tmp_path / "my_rows-1.dist-info" / "entry_points.txt").write_text(entry)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    asked = subprocess.run(
        [sys.executable, "-c", ASKED],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    assert asked.stdout.split() == ["True", "True"]


def test_a_name_that_is_no_operation_is_refused() -> None:
    with pytest.raises(ValueError, match="aten.relu.default"):
        lowering.lowering("relu")


@pytest.fixture(scope="module")
def dropout() -> fx.GraphModule:
    class Dropped(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return F.dropout(x, 0.3), F.dropout(x, 0.3)

    graph_module, _ = torch._functorch.aot_autograd.aot_export_module(
        Dropped(),
        (torch.ones(50, 40),),
        trace_joint=False,
        decompositions=lowering.decompositions(),
    )
    return graph_module


def test_dropout_is_repeatable_and_another_one_each_time(dropout: fx.GraphModule) -> None:
    ones = jax.numpy.ones((50, 40))
    key = jax.random.key(3)
    first, second = lowering.run_graph(dropout, [ones], key)
    again, _ = lowering.run_graph(dropout, [ones], key)
    other, _ = lowering.run_graph(dropout, [ones], jax.random.fold_in(key, 1))
    assert (first == again).all()
    assert not (first == second).all()
    assert not (first == other).all()
    kept = float((first > 0).mean())
    assert abs(kept - 0.7) < 0.05  # 2000 draws: 5 deviations
    assert float(abs(first[first > 0] - 1 / 0.7).max()) < 1e-6


def test_drawing_without_a_key_is_an_error(dropout: fx.GraphModule) -> None:
    with pytest.raises(ValueError, match="no key"):
        lowering.run_graph(dropout, [jax.numpy.ones((50, 40))])


class Images(nn.Module):
    """What convolution nets are made of, with an axis or two moved about."""

    def __init__(self) -> None:
        super().__init__()
        # BatchNorm takes a bias away again: its gradient would be rounding, and nothing else.
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.wide = nn.Conv2d(8, 16, 1, stride=2)
        self.deep = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.layer_norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 3, 1, 1)
        x = self.wide(F.pad(x, (0, 1)))
        x = x * torch.sigmoid(F.adaptive_avg_pool2d(x, 1)) + F.avg_pool2d(x, 3, 1, 1)
        a, b = self.deep(x).chunk(2, 1)
        x = torch.cat([b, a], 1)
        x = self.layer_norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.head(F.gelu(x).mean((2, 3)))


def test_rules_of_layout_change_no_number_and_leave_few_transpositions() -> None:
    torch.manual_seed(0)
    model = Images()
    tensors = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
    tensors.update(model.named_buffers())

    def function(tensors: Any, images: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, tensors, (images,))

    args = (tensors, torch.randn(4, 3, 17, 16, requires_grad=True))
    rules = lowering.Rules(
        channels_last=True,
        products_for_1x1=True,
        products_for_patches=True,
        products_for_small_images=True,
        weights_by_image=True,
        pools_by_place=True,
    )
    assert not against_torch.check(function, args, {})
    assert not against_torch.check(function, args, {}, rules=rules)


@pytest.mark.parametrize(
    ("number", "spatial", "kernel", "stride", "padding", "dilation"),
    [(number, *sizes) for number, sizes in enumerate([
        # up to nine output pixels
        ((2, 2), (3, 3), 1, 1, 1), ((1, 1), (3, 3), 1, 1, 1), ((4, 3), (3, 3), 2, 1, 1),
        ((3, 3), (3, 3), 1, 1, 1), ((1, 2), (7, 5), 1, (3, 2), 1), ((3, 3), (2, 2), 1, 1, 3),
        ((2,), (3,), 1, 1, 1), ((2, 1, 2), (3, 3, 3), 1, 1, 1), ((1, 1), (2, 2), 1, 2, 3),
        # 128 and more
        ((12, 11), (3, 3), 1, 1, 1), ((33, 32), (7, 7), 2, 3, 1), ((17, 16), (3, 2), 1, 0, 2),
        ((140,), (5,), 1, 2, 1), ((6, 6, 6), (2, 3, 1), 1, (1, 1, 0), 1),
        # side by side, few and many, and what is left over at an end
        ((64, 64), (32, 32), 32, 0, 1), ((33, 50), (2, 3), (2, 3), 0, 1), ((7, 5), (7, 5), 9, 0, 1),
        ((12,), (4,), 4, 0, 1), ((5, 4, 6), (2, 2, 3), (2, 2, 3), 0, 1),
        # kernels of too many places, few outputs and many
        ((9, 9), (9, 9), 1, 1, 1), ((20, 20), (9, 9), 1, 0, 1),
    ])],
)  # fmt: skip
def test_convolutions_as_products_are_torchs(
    number: int, spatial: Any, kernel: Any, stride: Any, padding: Any, dilation: Any
) -> None:
    torch.manual_seed(0)
    dtype = (torch.float32, torch.bfloat16)[number % 2]  # in turn: both take the same way
    rank = len(spatial)
    function = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]
    x = torch.randn(3, 4, *spatial).to(dtype).requires_grad_()
    w = torch.randn(5, 4, *kernel).to(dtype).requires_grad_()
    args = (x, w, None, stride, padding, dilation)
    rules = lowering.Rules(
        channels_last=True, products_for_patches=True, products_for_small_images=True,
        weights_by_image=True,
    )  # fmt: skip
    few = function(*args)[0, 0].numel() <= 9
    patches = set(kernel) == {stride} or tuple(kernel) == stride
    left = 0 if few or patches else 2  # forward, and the gradient of the input
    if len(w[0, 0].flatten()) > 64 and not patches:
        left = 3  # that of the weight as well
    assert not against_torch.check(
        function, args, {}, rules=rules, calls={"stablehlo.convolution": left}
    )


_DTYPES = (torch.float32, torch.bfloat16)  # in turn
_POOLS = [
    ((9, 8), 3, 2, 1, False), ((9, 8), 3, 2, 1, True), ((7, 6), (2, 3), (3, 1), (1, 0), False),
    ((5, 6), 2, 2, 0, True), ((8, 8), 2, 3, 0, False), ((5, 6, 4), (2, 3, 1), 2, (1, 1, 0), True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("spatial", "kernel", "stride", "padding", "ceil_mode", "dtype", "channels_last"),
    [
        *((*pool, _DTYPES[(number + channels_last) % 2], channels_last)
          for number, pool in enumerate(_POOLS) for channels_last in (False, True)),
        ((2, 4), (1, 257), 1, (0, 128), False, torch.float32, True),  # too many for that
    ],
)  # fmt: skip
def test_pools_by_place_give_each_gradient_to_the_first_largest(
    spatial: Any, kernel: Any, stride: Any, padding: Any, ceil_mode: bool,
    dtype: torch.dtype, channels_last: bool,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    x = torch.randint(0, 4, (3, 5, *spatial)).to(dtype).requires_grad_()  # many are equal
    rank = len(spatial)
    pool, convolve = (F.max_pool2d, F.max_pool3d)[rank - 2], (F.conv2d, F.conv3d)[rank - 2]
    one = torch.eye(5).reshape(5, 5, *(1,) * rank).to(dtype)

    def function(x: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
        return pool(convolve(x, one), kernel, stride, padding, ceil_mode=ceil_mode)

    rules = lowering.Rules(pools_by_place=True, channels_last=channels_last)
    assert not against_torch.check(function, (x, one), {}, rules=rules)


@pytest.mark.parametrize("shape", [(64, 64), (3, 5, 7)])
def test_neighbours_that_share_a_random_block_are_dropped_independently(shape: Any) -> None:
    from accbench.engines.jax.lowering.rows import random

    masks = jax.numpy.stack(
        [random._keep_mask(jax.random.key(n), 0.75, shape) for n in range(200)]
    ).reshape(200, -1)
    num_draws = masks.shape[0] * (masks.shape[1] // 4)
    places = masks[:, : masks.shape[1] // 4 * 4].reshape(-1, 4).astype(float)
    deviation = (0.75 * 0.25 / num_draws) ** 0.5
    assert abs(places.mean(0) - 0.75).max() < 5 * deviation
    # Independent ones are correlated by chance alone: a deviation is 1 / sqrt(number of draws).
    correlations = jax.numpy.corrcoef(places.T) - jax.numpy.eye(4)
    assert abs(correlations).max() < 5 / num_draws**0.5


@pytest.mark.parametrize(
    ("function", "shapes", "is_padded"),
    [
        (torch.mm, ((24, 16), (16, 21)), True),
        (torch.mm, ((21, 13), (13, 24)), True),
        (torch.bmm, ((2, 9, 16), (2, 16, 9)), True),
        (torch.addmm, ((21,), (24, 16), (16, 21)), True),
        (torch.baddbmm, ((2, 8, 9), (2, 8, 16), (2, 16, 9)), True),
        (torch.mm, ((24, 16), (16, 32)), False),
    ],
)
def test_large_products_of_odd_sizes_are_computed_with_zeros_at_their_edges(
    monkeypatch: pytest.MonkeyPatch, function: Any, shapes: Any, is_padded: bool
) -> None:
    from accbench.engines.jax.lowering.rows import products

    monkeypatch.setattr(products, "_MIN_ALIGNED_FLOPS", 1)
    torch.manual_seed(0)
    args = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
    rules = lowering.Rules(aligned_products=True)
    assert not against_torch.check(function, args, {}, rules=rules)
    with mock.patch.dict(os.environ):  # torch's tracing leaves a folder's name there
        graph = make_fx(function, tracing_mode="fake")(*args)
    arrays = [jax.numpy.ones(shape, "bfloat16") for shape in shapes]
    run = jax.jit(lambda *a: lowering.run_graph(graph, a, rules=rules))
    assert ("stablehlo.pad" in run.lower(*arrays).as_text()) is is_padded
