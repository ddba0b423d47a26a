"""XLA's optimised programs as lists of kernels: bytes, operations and order, counted by hand."""

import json

import pytest

from accbench.preflight import hlo, kernels
from tests.preflight.optimized_program import PROGRAM


@pytest.fixture(scope="module")
def kernels_by_name() -> dict[str, kernels.Kernel]:
    return {kernel.name: kernel for kernel in kernels.list_kernels(hlo.parse(PROGRAM))}


def test_kernels_come_in_the_order_in_which_they_run(kernels_by_name):
    assert list(kernels_by_name) == [
        "cudnn-conv.1", "loop_add_fusion", "update", "gemm_fusion", "all-reduce-start", "negate.1",
        "cudnn-conv.2", "all-reduce-done", "all-reduce.7", "copy.1", "transpose.1",
    ]  # fmt: skip


def test_a_convolution_of_groups(kernels_by_name):
    kernel = kernels_by_name["cudnn-conv.1"]
    # Each of 2*6*6*6 results sums 3 x 3 places of the 2 channels of its group.
    assert kernel.flops == 2 * (2 * 6 * 6 * 6) * (3 * 3 * 2)
    assert kernel.num_bytes == 2 * (2 * 8 * 8 * 4 + 6 * 3 * 3 * 2 + 2 * 6 * 6 * 6) + 512
    assert kernel.kind == kernels.CONVOLUTION
    assert kernel.factors == "f16"
    assert kernel.layout == "b01f_o01i->b01f"
    assert kernel.source == "net/conv1/aten__convolution"
    assert kernels_by_name["cudnn-conv.2"].of_weights
    assert not kernel.of_weights


def test_fusions_read_what_they_use(kernels_by_name):
    # 8 rows of the 64, and the halves; what is written is float32
    assert kernels_by_name["loop_add_fusion"].num_bytes == 4 * 8 * 4 + 2 * 8 * 4 + 4 * 8 * 4
    # in place: the update is read and written, the rest of the table is not touched
    assert kernels_by_name["update"].num_bytes == 4 * 2 * 4 + 4 + 4 * 2 * 4


def test_products_copies_loops_and_reductions(kernels_by_name):
    assert kernels_by_name["gemm_fusion"].flops == 2 * 32 * 8 * 16
    assert kernels_by_name["gemm_fusion"].factors == "bf16"
    assert kernels_by_name["gemm_fusion"].num_bytes == 2 * (32 * 16 + 16 * 8 + 32 * 8)
    assert kernels_by_name["negate.1"].repeats == 5
    assert kernels_by_name["copy.1"].num_bytes == 2 * 4 * 64 * 4
    assert kernels_by_name["transpose.1"].kind == kernels.TRANSPOSE
    assert kernels_by_name["all-reduce-start"].num_bytes == 4 * 2 * 4


@pytest.mark.parametrize(
    ("target", "mask_type", "flops"),
    [
        ("__cudnn$fmhaSoftmax", "NO_MASK", 2 * 2 * (2 * 3 * 10 * 12) * 8),
        ("__cudnn$fmhaSoftmax", "CAUSAL", 2 * 2 * (2 * 3 * 10 * 12) * 8 // 2),
        ("__cudnn$fmhaSoftmaxBackward", "PADDING", 5 * 2 * (2 * 3 * 10 * 12) * 8),
    ],
)
def test_attention_by_cudnn(target, mask_type, flops):
    config = {"dimensions": ["2", "3", "10", "12"], "layout": {"minor_to_major": ["3"]}}
    config = {"intermediate_tensor_shape": config, "mask_type": mask_type}
    text = json.dumps({"cudnn_fmha_backend_config": config}, separators=(",", ":"))
    program = f"""HloModule step
ENTRY %main (query: f16[2,10,3,8], key: f16[2,12,3,8]) -> f16[2,3,10,8] {{
  %query = f16[2,10,3,8]{{3,2,1,0}} parameter(0)
  %key = f16[2,12,3,8]{{3,2,1,0}} parameter(1)
  ROOT %attention.1 = (f16[2,3,10,8]{{3,1,2,0}}, u8[4096]{{0}}) custom-call(%query, %key), \
custom_call_target="{target}", backend_config={text}
}}
"""
    (kernel,) = kernels.list_kernels(hlo.parse(program))
    assert (kernel.kind, kernel.factors, kernel.flops) == (kernels.ATTENTION, "f16", flops)
    assert kernel.num_bytes == 2 * 2 * (10 * 3 * 8) * 2 + 2 * (12 * 3 * 8) * 2  # no workspace
