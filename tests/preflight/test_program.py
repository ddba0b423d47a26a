"""XLA's optimised programs as text: bytes, operations and order, counted by hand."""

import pytest

from accbench.errors import RequestError
from accbench.pjrt import gpu
from accbench.preflight import hlo, kernels, summary

H100 = gpu.load("h100")

PROGRAM = """\
HloModule step, is_scheduled=true

%fused_add (param_0: f16[8,4], param_1: f32[64,4]) -> f32[8,4] {
  %param_0 = f16[8,4]{1,0} parameter(0)
  %param_1 = f32[64,4]{1,0} parameter(1)
  %slice.1 = f32[8,4]{1,0} slice(%param_1), slice={[0:8], [0:4]}
  %convert.1 = f32[8,4]{1,0} convert(%param_0)
  ROOT %add.1 = f32[8,4]{1,0} add(%convert.1, %slice.1)
}

%fused_update (param_0: f32[64,4], param_1: f32[2,4], param_2: s32[]) -> f32[64,4] {
  %param_0 = f32[64,4]{1,0} parameter(0)
  %param_1 = f32[2,4]{1,0} parameter(1)
  %param_2 = s32[] parameter(2)
  ROOT %dynamic-update-slice.1 = f32[64,4]{1,0} dynamic-update-slice(%param_0, %param_1, %param_2)
}

%fused_dot (param_0: bf16[32,16], param_1: bf16[16,8]) -> bf16[32,8] {
  %param_0 = bf16[32,16]{1,0} parameter(0)
  %param_1 = bf16[16,8]{1,0} parameter(1)
  ROOT %dot.1 = bf16[32,8]{1,0} dot(%param_0, %param_1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (state: (s32[], f32[16])) -> (s32[], f32[16]) {
  %state = (s32[], f32[16]{0}) parameter(0)
  %get-tuple-element.5 = f32[16]{0} get-tuple-element(%state), index=1
  ROOT %negate.1 = f32[16]{0} negate(%get-tuple-element.5)
}

%condition (state.1: (s32[], f32[16])) -> pred[] {
  %state.1 = (s32[], f32[16]{0}) parameter(0)
  ROOT %constant.9 = pred[] constant(true)
}

%command_buffer (p.1: f32[64,4]) -> f32[64,4] {
  %p.1 = f32[64,4]{1,0} parameter(0)
  ROOT %copy.1 = f32[64,4]{1,0} copy(%p.1)
}

ENTRY %step (images: f16[2,8,8,4], weights: f16[6,3,3,2], table: f32[64,4], rows: f32[2,4]) -> f32[8,4] {
  %images = f16[2,8,8,4]{3,2,1,0} parameter(0)
  %weights = f16[6,3,3,2]{3,2,1,0} parameter(1)
  %table = f32[64,4]{1,0} parameter(2)
  %rows = f32[2,4]{1,0} parameter(3)
  %half = f16[8,4]{1,0} parameter(4)
  %place = s32[] parameter(5)
  %left = bf16[32,16]{1,0} parameter(6)
  %right = bf16[16,8]{1,0} parameter(7)
  %loop = (s32[], f32[16]{0}) parameter(8)
  %cudnn-conv.1 = (f16[2,6,6,6]{3,2,1,0}, u8[512]{0}) custom-call(%images, %weights), window={size=3x3}, dim_labels=b01f_o01i->b01f, feature_group_count=2, custom_call_target="__cudnn$convForward", metadata={op_name="net.1/conv1.12/aten__convolution"}
  %loop_add_fusion = f32[8,4]{1,0} fusion(%half, %table), kind=kLoop, calls=%fused_add
  %update = f32[64,4]{1,0} fusion(%table, %rows, %place), kind=kLoop, calls=%fused_update
  %gemm_fusion = bf16[32,8]{1,0} fusion(%left, %right), kind=kCustom, calls=%fused_dot, backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}
  %all-reduce-start = f32[2,4]{1,0} all-reduce-start(%rows), to_apply=%sum
  %while.1 = (s32[], f32[16]{0}) while(%loop), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %cudnn-conv.2 = (f16[6,3,3,2]{3,2,1,0}, u8[0]{0}) custom-call(%images, %images), window={size=3x3}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardFilter", metadata={op_name="backward.net.conv1.90/aten__convolution_backward"}
  %all-reduce-done = f32[2,4]{1,0} all-reduce-done(%all-reduce-start)
  %all-reduce.7 = f32[2,4]{1,0} all-reduce(%all-reduce-done), to_apply=%sum
  %call.1 = f32[64,4]{1,0} call(%table), to_apply=%command_buffer
  ROOT %transpose.1 = f32[4,8]{1,0} transpose(%loop_add_fusion), dimensions={1,0}
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def found() -> dict[str, kernels.Kernel]:
    return {kernel.name: kernel for kernel in kernels.list_kernels(hlo.parse(PROGRAM))}


def test_kernels_come_in_the_order_in_which_they_run(found):
    assert list(found) == [
        "cudnn-conv.1", "loop_add_fusion", "update", "gemm_fusion", "all-reduce-start", "negate.1",
        "cudnn-conv.2", "all-reduce-done", "all-reduce.7", "copy.1", "transpose.1",
    ]  # fmt: skip


def test_a_convolution_of_groups(found):
    kernel = found["cudnn-conv.1"]
    # Each of 2*6*6*6 results sums 3 x 3 places of the 2 channels of its group.
    assert kernel.flops == 2 * (2 * 6 * 6 * 6) * (3 * 3 * 2)
    assert kernel.num_bytes == 2 * (2 * 8 * 8 * 4 + 6 * 3 * 3 * 2 + 2 * 6 * 6 * 6) + 512
    assert kernel.kind == kernels.CONVOLUTION
    assert kernel.factors == "f16"
    assert kernel.layout == "b01f_o01i->b01f"
    assert kernel.source == "net/conv1/aten__convolution"
    assert found["cudnn-conv.2"].of_weights
    assert not kernel.of_weights


def test_fusions_read_what_they_use(found):
    # 8 rows of the 64, and the halves; what is written is float32
    assert found["loop_add_fusion"].num_bytes == 4 * 8 * 4 + 2 * 8 * 4 + 4 * 8 * 4
    # in place: the update is read and written, the rest of the table is not touched
    assert found["update"].num_bytes == 4 * 2 * 4 + 4 + 4 * 2 * 4


def test_products_copies_loops_and_reductions(found):
    assert found["gemm_fusion"].flops == 2 * 32 * 8 * 16
    assert found["gemm_fusion"].factors == "bf16"
    assert found["gemm_fusion"].num_bytes == 2 * (32 * 16 + 16 * 8 + 32 * 8)
    assert found["negate.1"].repeats == 5
    assert found["copy.1"].num_bytes == 2 * 4 * 64 * 4
    assert found["transpose.1"].kind == kernels.TRANSPOSE
    assert found["all-reduce-start"].num_bytes == 4 * 2 * 4


def test_a_bound_is_the_slower_of_memory_and_products(found):
    kernel = found["gemm_fusion"]
    by_memory = kernel.num_bytes / 3352e9
    assert summary.bound_s(kernel, H100) == pytest.approx(by_memory)
    heavy = kernels.Kernel("heavy", kernels.PRODUCT, 10, flops=10**12, factors="f16")
    assert summary.bound_s(heavy, H100) == pytest.approx(1e12 / 989.4e12)
    looped = found["negate.1"]
    assert summary.bound_s(looped, H100) == pytest.approx(5 * looped.num_bytes / 3352e9)
    assert summary.bound_s(found["all-reduce.7"], H100) == 0


def test_reductions_are_early_where_a_product_comes_after_their_start(found):
    early = summary.summarize_reduction(list(found.values()), H100)
    assert early is not None
    first, second = early["all_reduces"]
    assert first["before_last_product"]
    assert first["products_beside"] == 1  # the weight's gradient; the matrix product was before
    assert not second["before_last_product"]
    assert second["beside_s"] == 0
    assert early["started_before_last_product"] == 0.5
    assert summary.summarize_reduction([found["copy.1"]], H100) is None


def test_totals_kinds_and_large_tensors():
    large = hlo.Shape("f32", (2000, 1000))
    weights = hlo.Shape("f32", (1500, 1000))
    many = [
        kernels.Kernel("a", kernels.LOOP, 8_000_000, results=(large, weights), source="net/a"),
        kernels.Kernel("b", kernels.LOOP, 100, results=(hlo.Shape("f32", (10,)),), to_host=True),
        kernels.Kernel("c", kernels.DONE, 0),
    ]
    result = summary.summarize_kernels(many, H100, 32, {"kKernel": 7}, parameter_sizes=[1_500_000])
    assert result["step"]["bytes"] == 8_000_100
    assert result["step"]["launches"] == 7
    assert result["step"]["small_launches"] == 1
    assert result["step"]["samples_per_s_at_most"] == pytest.approx(32 / (8_000_100 / 3352e9))
    assert result["kinds"][0]["launches"] == 2
    assert result["host_transfers"] == ["b"]
    (row,) = result["large_tensors"]
    assert (row["element_type"], row["count"], row["largest"]) == ("f32", 1, "f32[2000,1000]")
    assert row["source"] == "net/a"


def test_thunks_are_counted_without_groups_and_waits():
    text = (
        "kCommandBuffer\t\n    kCopy  \t\n    kKernel\t, kernel = a\nkConvolution\nkAllReduceDone\n"
    )
    assert summary.thunk_counts(text) == {"kCopy": 1, "kKernel": 1, "kConvolution": 1}


def test_what_cannot_be_read_is_told():
    with pytest.raises(RequestError, match="cannot be read"):
        hlo.parse("nothing")
    with pytest.raises(RequestError, match="'f7'"):
        hlo.shapes("f7[2,3]")
