"""Eager PyTorch's step against counts by hand; and counting leaves nothing behind."""

import logging
import os
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional

from accbench import models
from accbench.config import TaskConfig
from accbench.engines import ddp
from accbench.errors import RequestError
from accbench.pjrt import gpu
from accbench.preflight import eager, summary

H100 = gpu.load("h100")
IMAGES = [
    {"shape": [8, 3, 32, 32], "dtype": "torch.uint8"},
    {"shape": [8], "dtype": "torch.int64"},
]


class Spec:
    """A net whose loss is the sum of what it gives."""

    def __init__(self, build) -> None:
        self.build_net = build

    def build(self, num_classes: int) -> nn.Module:
        return self.build_net()

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return model(batch[0]).sum()


def step(build, *shape: int, **task) -> list:
    batch = [{"shape": list(shape), "dtype": "torch.float32"}]
    return eager.trace_step_kernels(TaskConfig(**task), Spec(build), 0, batch)


def num_bytes(found: list, name: str) -> list[int]:
    return [kernel.num_bytes for kernel in found if kernel.name == name]


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU())


N, I, O = 32, 64, 16  # noqa: E741
P = I * O + O


def test_linear_by_hand():
    found = step(linear, N, I, amp_level="O0", optimizer="sgd")
    product = 2 * N * I * O
    assert [(kernel.name, kernel.num_bytes, kernel.flops) for kernel in found] == [
        ("addmm", 4 * (N * I + P + N * O), product),
        ("relu", 4 * (N * O + N * O), 0),
        ("sum", 4 * (N * O + 1), 0),
        ("ones_like", 4, 0),
        ("threshold_backward", 4 * (1 + N * O + N * O), 0),  # the sum's gradient is one number
        ("mm", 4 * (N * O + N * I + I * O), product),
        ("sum", 4 * (N * O + O), 0),
        ("_fused_sgd_", 4 * (3 * P + 2 * P), 0),  # parameter, gradient, momentum; no gradient back
        ("add_", 4 * 2, 0),  # steps of the weights, and of the biases
        ("add_", 4 * 2, 0),
    ]


def test_linear_cast_to_float16():
    found = step(linear, N, I)
    product = 2 * N * I * O
    assert [(kernel.name, kernel.num_bytes, kernel.flops) for kernel in found[:6]] == [
        ("_to_copy", (4 + 2) * N * I, 0),
        ("_to_copy", (4 + 2) * I * O, 0),
        ("_to_copy", (4 + 2) * O, 0),
        ("addmm", 2 * (N * I + P + N * O), product),
        ("relu", 2 * 2 * N * O, 0),
        ("sum", 2 * N * O + 4, 0),  # float32 inside, and what comes out
    ]
    assert {kernel.factors for kernel in found if kernel.flops} == {"f16"}
    # The scaler's: look at every gradient, which is written as it was.
    check = num_bytes(found, "_amp_foreach_non_finite_check_and_unscale_")
    assert check == [4 * 2 * P + 4 + 4 + 4]
    # Unscaled in the optimizer, and so written as well; two counts of steps, scale, overflow.
    assert num_bytes(found, "_fused_adamw_") == [4 * 8 * P + 4 * (2 + 1 + 1)]


def test_adamw_without_a_scaler():
    found = step(linear, N, I, amp_dtype="bfloat16")
    # p, g, m and v are read; p, m and v written.
    assert num_bytes(found, "_fused_adamw_") == [4 * 7 * P + 4 * 2]
    assert not num_bytes(found, "_amp_foreach_non_finite_check_and_unscale_")
    assert {kernel.factors for kernel in found if kernel.flops} == {"bf16"}


def test_convolution_and_norm_by_hand():
    x, w, y = 8 * 3 * 32 * 32, 16 * 3 * 3 * 3, 8 * 16 * 32 * 32

    def build() -> nn.Module:
        layer = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        return nn.Sequential(layer, nn.BatchNorm2d(16), nn.ReLU(inplace=True))

    found = step(build, 8, 3, 32, 32)
    kernels = {kernel.name: kernel for kernel in found}
    assert kernels["convolution"].num_bytes == 2 * (x + w + y)
    assert kernels["convolution_backward.weight"].num_bytes == 2 * (y + x + w)
    assert "convolution_backward.input" not in kernels  # nobody asks for the images' gradient
    product = 2 * 8 * 32 * 32 * 16 * 3 * 3 * 3
    assert kernels["convolution"].flops == kernels["convolution_backward.weight"].flops == product
    assert kernels["relu_"].num_bytes == 2 * (y + y)
    assert kernels["threshold_backward"].num_bytes == 2 * (y + y + y)
    # Twice the input and the gradient. A channel's numbers are some hundred bytes.
    assert kernels["native_batch_norm"].num_bytes == pytest.approx(2 * (2 * y + y), abs=1024)
    backward = kernels["native_batch_norm_backward"].num_bytes
    assert backward == pytest.approx(2 * (2 * y + 2 * y + y), abs=1024)


def test_bias_of_a_convolution_is_a_kernel_of_its_own():
    found = step(lambda: nn.Conv2d(4, 8, 1), 2, 4, 16, 16, amp_level="O0")
    y = 2 * 8 * 16 * 16
    assert num_bytes(found, "add_") == [4 * (8 + y + y)]
    assert num_bytes(found, "convolution_backward.bias") == [4 * (1 + 8)]  # one number, expanded


@pytest.mark.parametrize("channels_last", [True, False])
def test_layout_is_the_engines(channels_last):
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 8, 3, bias=False), nn.Flatten(), nn.Linear(8 * 36, 2))

    found = step(build, 2, 4, 8, 8, options={"ddp": ddp.Engine.Options(channels_last)})
    # Rows are channels first. No gradient is copied, for each lies as its weights do.
    assert num_bytes(found, "clone") == [2 * (8 * 36) * (2 + 2)] * channels_last
    assert not num_bytes(found, "copy_")


def test_groups_divide_products():
    found = step(lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), 2, 8, 16, 16)
    assert {kernel.flops for kernel in found if kernel.flops} == {2 * 2 * 16 * 16 * 8 * 3 * 3}


class _Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.linear, self.rows = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = functional.max_pool2d(functional.relu(self.norm(self.convolution(images))), 2)
        tokens = self.rows(self.linear(hidden.flatten(2).transpose(1, 2)))
        tokens = functional.softmax(self.linear(tokens), dim=-1)
        query = self.linear(tokens).unsqueeze(1)
        attended = functional.scaled_dot_product_attention(query, query, query).squeeze(1)
        return functional.dropout(attended, 0.5).mean(1)


@pytest.mark.parametrize(("amp_dtype", "half"), [("float16", "f16"), ("bfloat16", "bf16")])
def test_casts_are_those_of_cuda(amp_dtype, half):
    found = step(_Everything, 8, 3, 32, 32, amp_dtype=amp_dtype)
    types: dict[str, set[str]] = {}
    for kernel in found:
        types.setdefault(kernel.name, set()).add(kernel.factors)
    for name in (
        "convolution", "native_batch_norm", "relu", "max_pool2d_with_indices",
        "_scaled_dot_product_flash_attention", "native_dropout", "convolution_backward.weight",
    ):  # fmt: skip
        assert types[name] == {half}, name
    assert types["native_layer_norm"] == {"f32"}
    # On CUDA softmax reads float16 and writes float32 in one go, but not bfloat16.
    assert types["_softmax"] == {half if half == "f16" else "f32"}


def test_float32_is_left_alone_without_autocast():
    found = step(_Everything, 8, 3, 32, 32, amp_level="O0")
    assert {kernel.factors for kernel in found} == {"f32"}
    names = {kernel.name for kernel in found}
    assert {"_scaled_dot_product_efficient_attention", "native_dropout"} <= names


def test_shared_weights_are_cast_and_updated_once():
    def build() -> nn.Module:
        one, two = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        two.weight = one.weight
        return nn.Sequential(one, two)

    found = step(build, 16, 64, amp_dtype="bfloat16")
    assert num_bytes(found, "_to_copy").count(6 * 64 * 64) == 2  # the weights, and their gradient
    assert num_bytes(found, "_fused_adamw_") == [4 * 7 * 64 * 64 + 4]


def test_parts_of_a_batch_take_one_update():
    whole, parts = (Counter(kernel.name for kernel in step(linear, N, I, accumulate=parts))
                    for parts in (1, 2))  # fmt: skip
    assert (whole["addmm"], parts["addmm"]) == (1, 2)
    assert whole["_fused_adamw_"] == parts["_fused_adamw_"] == 1


def test_clipping_takes_all_gradients_at_once():
    found = step(linear, N, I, amp_level="O0", clip_norm=1.0)
    assert num_bytes(found, "_foreach_norm") == [4 * P + 4 * 2]
    assert len(num_bytes(found, "_foreach_mul_")) == 1


def test_bound_is_the_sum_over_operations():
    task = TaskConfig(model="tests.nets:tiny")
    found = eager.trace_step_kernels(task, models.of_task(task), 10, IMAGES)
    counted = eager.count(task, H100, 10, IMAGES)
    assert counted == {
        "launches": len(found),
        "bytes": sum(kernel.num_bytes for kernel in found),
        "flops": sum(kernel.flops for kernel in found),
        "bound_s": sum(summary.bound_s(kernel, H100) for kernel in found),
        "samples_per_s_at_most": 8 / counted["bound_s"],
        "note": eager.NOTE,
    }
    assert counted["bound_s"] >= counted["bytes"] / H100.bytes_per_s


def test_resnet50_is_what_the_literature_has():
    batch = [{"shape": [256, 3, 224, 224], "dtype": "torch.uint8"},
             {"shape": [256], "dtype": "torch.int64"}]  # fmt: skip
    task = TaskConfig(amp_dtype="float16")
    found = eager.trace_step_kernels(task, models.of_task(task), 1000, batch)
    # Of an image 4.09e9 multiplications (torchvision's table), and 11.1e6 numbers come out of
    # convolutions (Radosavovic et al., Designing Network Design Spaces, 2020), each of which
    # BatchNorm reads twice and writes, and on the way back reads twice with its gradient.
    assert sum(kernel.flops for kernel in found) == pytest.approx(3 * 2 * 4.09e9 * 256, rel=0.02)
    norms = num_bytes(found, "native_batch_norm") + num_bytes(found, "native_batch_norm_backward")
    assert sum(norms) == pytest.approx((3 + 5) * 2 * 11.1e6 * 256, rel=0.01)


def test_content_costs_no_memory():
    size = 1 << 20
    found = step(lambda: nn.Linear(size, size, bias=False), 4, size, amp_dtype="bfloat16")
    assert num_bytes(found, "_fused_adamw_") == [4 * 7 * size**2 + 4]


def state() -> dict:
    kinds = ("cpu", "cuda", "xla", "privateuseone")
    return {
        "autocast": [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds],
        "device": torch.get_default_device(),
        "dtype": torch.get_default_dtype(),
        "random": torch.get_rng_state().tolist(),
        "gradients": torch.is_grad_enabled(),
        "kernels": [
            torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastPrivateUse1")
            for name in ("aten::linear", "aten::dropout")
        ],
        "log": logging.getLogger("torch._subclasses.fake_tensor").disabled,
        "benchmark": torch.backends.cudnn.benchmark,
        "environment": {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"},
    }


# The last is built for images of another size.
@pytest.mark.parametrize(
    ("model", "works"),
    [("tests.nets:dropping", True), ("tests.nets:decides_by_value", False), ("arcface_r18", False)],
)
def test_nothing_is_changed_or_said(model, works, capfd, caplog):
    before = state()
    counted = eager.count(TaskConfig(model=model), H100, 10, IMAGES)
    assert (counted is not None) == works
    assert state() == before
    assert functional.linear(torch.ones(1, 2), torch.ones(2, 2)).tolist() == [[2, 2]]
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_unknown_model():
    with pytest.raises(RequestError, match="unknown model"):
        eager.count(TaskConfig(model="resnet51"), H100, 10, IMAGES)
