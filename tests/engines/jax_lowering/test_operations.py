"""Operations through the table beside torch's own, forward and as a training step uses them."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("jax")

from benchmarks import against_torch

# Of torch's own list, whose samples try broadcasting, 0-d and empty tensors, negative dims...
NAMES = [
    "add",
    "mul",
    "div",
    "pow",
    "remainder",
    "floor_divide",
    "addcmul",
    "nan_to_num",
    "masked_fill",
    "sum",
    "argmax",
    "max.reduction_with_dim",
    "var",
    "cumsum",
    "cumprod",
    "einsum",
    "permute",
    "cat",
    "split",
    "scatter_add",
    "scatter_reduce.mean",
    "index_put",
    "index_add",
    "masked_scatter",
    "sort",
    "topk",
    "nn.functional.conv2d",
    "nn.functional.conv_transpose2d",
    "nn.functional.max_pool2d",
    "nn.functional.avg_pool2d",
    "nn.functional.adaptive_avg_pool2d",
    "nn.functional.adaptive_max_pool2d",
    "nn.functional.interpolate.bilinear",
    "nn.functional.interpolate.nearest",
    "nn.functional.interpolate.bicubic",
    "nn.functional.pad.reflect",
    "nn.functional.batch_norm",
    "nn.functional.layer_norm",
    "nn.functional.group_norm",
    "softmax",
    "log_softmax",
    "nn.functional.embedding",
    "nn.functional.embedding_bag",
    "nn.functional.gelu",
    "nn.functional.prelu",
    "nn.functional.smooth_l1_loss",
    "nn.functional.cross_entropy",
    "nn.functional.kl_div",
    "nn.functional.binary_cross_entropy_with_logits",
    "nn.functional.scaled_dot_product_attention",
    "nn.functional.grid_sample",
]
COMPLEX: dict[str, Callable[..., Any]] = {
    "rfft2": lambda x, _: torch.fft.irfft2(torch.fft.rfft2(x) * torch.tensor(1 + 2j)),
    "fftn": lambda x, _: torch.fft.fftn(x, norm="ortho").abs(),
    "ifft": lambda x, y: torch.fft.ifft(torch.complex(x, y), dim=0).imag,
    "hfft": lambda x, y: torch.fft.hfft(torch.complex(x, y)),
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", torch.complex(x, y), (y + 1j).conj()).real,
    "polar": lambda x, y: torch.polar(x.abs() + 1, y).angle(),
    "powers": lambda x, y: (torch.complex(x, y) ** 2 / (torch.complex(y, x) + 3)).sum(0).abs(),
    "exp": lambda x, y: torch.view_as_real(torch.exp(torch.complex(x, y)) - 2j),
    "slices": lambda x, y: torch.complex(x, y)[:, 1::2].real + torch.fft.fft(x)[:, :2].imag,
}


@pytest.fixture(autouse=True, scope="module")
def _variables_of_torchs_own() -> Iterator[None]:
    """torch's compiler sets where its cache is when it is first imported."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    before = dict(os.environ)
    cache_dir()
    against_torch.op_infos()
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


def found(name: str) -> Any:
    for op in against_torch.op_infos():
        if name in (op.name, f"{op.name}.{op.variant_test_name}"):
            return op
    raise LookupError(name)


@pytest.mark.parametrize("name", NAMES)
def test_an_operation_is_torchs(name: str) -> None:
    op = found(name)
    # The dtypes in turn, for operations of a kind go the same way.
    dtypes = [d for d in (torch.float32, torch.bfloat16, torch.float16) if d in op.dtypes]
    dtype = dtypes[NAMES.index(name) % len(dtypes)]
    for sample in against_torch.samples(op, dtype, 1):
        problems = against_torch.check(op.op, (sample.input, *sample.args), sample.kwargs)
        assert not problems, (dtype, sample, problems)


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers_are_torchs(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(4, 5, generator=generator).requires_grad_() for _ in range(2)]
    problems = against_torch.check(COMPLEX[name], tuple(inputs), {})
    assert not problems, problems


def image(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def of_module(module: nn.Module, *inputs: torch.Tensor) -> tuple[Callable[..., Any], Any]:
    """A module as a function of its input and its parameters, all of them getting gradients."""
    parameters = {name: p.detach().requires_grad_() for name, p in module.named_parameters()}

    def function(parameters: Any, *inputs: torch.Tensor) -> Any:
        return torch.func.functional_call(module, parameters, inputs)

    return function, (parameters, *inputs)


class First(nn.Module):
    """A module's first output. (torch 2.8 itself takes an LSTM's last states apart wrongly: their
    shape has an axis too many.)"""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)[0]


MODULES: dict[str, Callable[[], tuple[Callable[..., Any], Any]]] = {
    "strided, dilated and grouped": lambda: of_module(
        nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2), image(2, 4, 9, 8)
    ),
    "transposed with groups and output padding": lambda: of_module(
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        image(2, 4, 5, 4),
    ),
    "transposed over three axes": lambda: of_module(
        nn.ConvTranspose3d(2, 3, 2, stride=2, dilation=2), image(1, 2, 3, 2, 3)
    ),
    "largest with ceil_mode and padding": lambda: (
        lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
        (image(2, 3, 8, 7),),
    ),
    "largest with dilation": lambda: (
        lambda x: F.max_pool2d(x, 2, 1, 1, dilation=2, return_indices=True),
        (image(2, 3, 7, 7),),
    ),
    "largest over three axes": lambda: (
        lambda x: F.max_pool3d(x, 2, 2, return_indices=True),
        (image(1, 2, 4, 5, 6),),
    ),
    "mean with ceil_mode, padding not counted": lambda: (
        lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
        (image(2, 3, 8, 7),),
    ),
    "adaptive to sizes that do not divide": lambda: (
        lambda x: F.adaptive_avg_pool2d(x, (3, 5)),
        (image(2, 3, 8, 7),),
    ),
    "lstm": lambda: of_module(First(nn.LSTM(3, 4, batch_first=True)), image(2, 3, 3)),
    "gru of both directions": lambda: of_module(nn.GRU(3, 4, bidirectional=True), image(2, 2, 3)),
    "encoder layer": lambda: of_module(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), image(2, 5, 8)
    ),
    "embedding with padding": lambda: of_module(
        nn.Embedding(6, 4, padding_idx=2), torch.tensor([[0, 2, 5], [2, 2, 1]])
    ),
    "cross entropy with weights, smoothing and ignored pixels": lambda: (
        lambda x, t, w: F.cross_entropy(x, t, w, ignore_index=1, label_smoothing=0.1),
        (image(2, 4, 3, 3), torch.randint(0, 4, (2, 3, 3)), torch.rand(4)),
    ),
    "antialiased": lambda: (
        lambda x: F.interpolate(x, (5, 4), mode="bilinear", antialias=True),
        (image(1, 2, 9, 7),),
    ),
    "orthogonal weights": lambda: of_module(
        nn.Sequential(
            nn.utils.parametrizations.orthogonal(nn.Linear(5, 3)),
            nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)),
        ),
        image(2, 5),
    ),
    "rrelu in evaluation": lambda: (
        lambda x: F.rrelu(x, 0.1, 0.4, training=False),
        (image(3, 4),),
    ),
    "labels that end early": lambda: (
        F.multilabel_margin_loss,
        (image(2, 4), torch.tensor([[3, 0, -1, 1], [1, -1, 0, 2]])),
    ),
    "labels of one, that end early": lambda: (
        lambda x, t: F.multilabel_margin_loss(x, t, reduction="none"),
        (image(4), torch.tensor([3, 0, -1, 1])),
    ),
    "weight norm": lambda: of_module(
        nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 2)),
            nn.Flatten(),
            nn.utils.parametrizations.weight_norm(nn.Linear(16, 3), dim=1),
        ),
        image(2, 3, 3, 3),
    ),
    "storage read with strides": lambda: (
        lambda x: (x * 2).as_strided((3, 2), (1, 4), 1),
        (image(3, 4),),
    ),
    "bytes as another dtype": lambda: (
        lambda x: x.detach().view(torch.int32) & 0xFF,
        (image(3, 4),),
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_arguments_that_models_use_are_torchs(name: str) -> None:
    torch.manual_seed(0)
    function, args = MODULES[name]()
    assert not against_torch.check(function, args, {})
