"""Summaries of a program's kernels: bounds, totals, reductions."""

import pytest

from accbench.pjrt import gpu
from accbench.preflight import hlo, kernels, summary
from tests.preflight.optimized_program import PROGRAM

H100 = gpu.load("h100")


@pytest.fixture(scope="module")
def kernels_by_name() -> dict[str, kernels.Kernel]:
    return {kernel.name: kernel for kernel in kernels.list_kernels(hlo.parse(PROGRAM))}


def test_a_bound_is_the_slower_of_memory_and_products(kernels_by_name):
    kernel = kernels_by_name["gemm_fusion"]
    by_memory = kernel.num_bytes / 3352e9
    assert summary.bound_s(kernel, H100) == pytest.approx(by_memory)
    heavy = kernels.Kernel("heavy", kernels.PRODUCT, 10, flops=10**12, factors="f16")
    assert summary.bound_s(heavy, H100) == pytest.approx(1e12 / 989.4e12)
    looped = kernels_by_name["negate.1"]
    assert summary.bound_s(looped, H100) == pytest.approx(5 * looped.num_bytes / 3352e9)
    assert summary.bound_s(kernels_by_name["all-reduce.7"], H100) == 0


def test_reductions_are_early_where_a_product_comes_after_their_start(kernels_by_name):
    early = summary.summarize_reduction(list(kernels_by_name.values()), H100)
    assert early is not None
    first, second = early["all_reduces"]
    assert first["before_last_product"]
    assert first["products_beside"] == 1  # the weight's gradient; the matrix product was before
    assert not second["before_last_product"]
    assert second["beside_s"] == 0
    assert early["started_before_last_product"] == 0.5
    assert summary.summarize_reduction([kernels_by_name["copy.1"]], H100) is None


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
    numbered = (
        "000: kCommandBuffer [source | next=003 (1)] \n    001: kCustomKernel [source | sink] a\n"
        "273: kAsyncStart [prev=1 (2)] async_id=273\n    274: kAllReduce [sink] kAllReduce\n"
        "275: kAsyncDone [sink]\n"
    )
    assert summary.thunk_counts(numbered) == {"kCustomKernel": 1, "kAllReduce": 1}
