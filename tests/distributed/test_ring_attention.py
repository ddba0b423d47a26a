"""Ring attention is attention: four processes with parts of sequences, beside whole ones."""

import json
import os

import pytest
import torch

from accbench.distributed import attention_blocks
from accbench.distributed.collectives import RankGroup
from accbench.distributed.ring_attention import chunks_per_rank
from tests.conftest import ROOT, python, several_ranks
from tests.engine_params import NEEDS_JAX
from tests.scripts.ring_attention_ranks import ALL_CASES, CASES, LOWERED, REPEATED, Case


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("ring")
    done = several_ranks(4, "-m", "tests.scripts.ring_attention_ranks", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_attention_and_gradients_are_those_of_whole_sequences(found, name):
    # Of bfloat16 what is rounded to it once: 2 ** -9 of each number at most.
    bars = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 3e-3}
    check_distances(found[name], CASES[name], bars)


def check_distances(of: dict, case: Case, bar: dict[torch.dtype, float]) -> None:
    for result in ("out", "q", "k", "v"):
        assert of[result] < (1e-2 if case.autocast else bar[case.dtype]), result


def run_lowered(folder, kind: str, xla_flags: str = "") -> dict:
    flags = f"{xla_flags} --xla_force_host_platform_device_count=4"
    done = python(
        "-m", "tests.scripts.ring_attention_devices", folder, kind, PYTHONPATH=str(ROOT),
        JAX_PLATFORMS="cpu", JAX_ENABLE_X64="1", XLA_FLAGS=flags.strip(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def lowered(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("lowered")
    return run_lowered(folder, "LOWERED", os.environ.get("XLA_FLAGS", ""))


def check_lowered(of: dict, name: str) -> None:
    # Weights and gradients are rounded to bfloat16 before they are multiplied, as by a GPU's.
    bars = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 5e-3}
    check_distances(of, ALL_CASES[name], bars)


@NEEDS_JAX
@pytest.mark.parametrize("name", LOWERED)
def test_lowered_to_jax_attention_is_that_of_whole_sequences(lowered, name):
    check_lowered(lowered[name], name)


@NEEDS_JAX
def test_lowered_to_jax_results_have_the_types_of_torchs(lowered):
    assert lowered["autocast"]["dtypes"] == ["bfloat16"] + ["float32"] * 3


@NEEDS_JAX
@pytest.mark.soak
@pytest.mark.parametrize("kind", ["LOWERED", "REPEATED"])
def test_optimised_too_lowered_attention_is_that_of_whole_sequences(tmp_path, kind):
    """As LLVM optimises what users run."""
    names = {"LOWERED": LOWERED, "REPEATED": REPEATED}[kind]
    of_cases = run_lowered(tmp_path, kind)
    for name in names:
        check_lowered(of_cases[name], name)
    if "bfloat16" in names:
        assert of_cases["bfloat16"]["dtypes"] == ["bfloat16"] * 4


@NEEDS_JAX
def test_one_program_serves_all_ranks_and_is_no_longer_for_more(lowered):
    for_three, for_four = lowered["program"].values()
    assert for_three == for_four
    assert for_four["branches"] == 0


@NEEDS_JAX
def test_xla_keeps_no_keys_for_the_backward_pass(lowered):
    """They would not be received a second time."""
    of = lowered["program"]["4"]
    # Keys and values, before the loop and in it, twice; their gradients in it, and twice behind it.
    assert of["permutes"] == of["compiled permutes"] == 2 * 2 * 2 + 2 * 3


@pytest.mark.parametrize("name", CASES)
def test_a_rank_keeps_its_part_alone_for_the_backward_pass(found, name):
    of = found[name]
    assert 0 < of["kept"] <= of["parts"]


def test_autocast_attends_in_bfloat16_and_gradients_have_their_inputs_types(found):
    assert found["autocast"]["dtypes"] == ["torch.bfloat16"] + ["torch.float32"] * 3
    assert found["bfloat16"]["dtypes"] == ["torch.bfloat16"] * 4


def test_every_rank_has_as_many_pairs_of_queries_and_keys():
    num_tokens, num_ranks = 48, 4
    positions = [chunks_per_rank(num_tokens, RankGroup("", r, num_ranks)) for r in range(num_ranks)]
    assert torch.cat(positions).sort().values.tolist() == [*range(num_tokens)]
    num_pairs = {(of_rank + 1).sum().item() for of_rank in positions}
    assert num_pairs == {num_tokens * (num_tokens + 1) // 2 // num_ranks}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (5, 1)])
@pytest.mark.parametrize("width", [40, 64, 128])
def test_a_gpus_kernels_compute_what_products_do(monkeypatch, is_causal, heads, width):
    num_heads, num_kv = heads
    q, k, v, grad = (
        torch.randn(2, 96, h, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for h in (num_heads, num_kv, num_kv, num_heads)
    )

    def results() -> list[torch.Tensor]:
        out, log_sums = attention_blocks.attend(q, k, v, is_causal, 0.2)
        gradients = attention_blocks.gradients(grad, q, k, v, out, log_sums, is_causal, 0.2)
        return [out, log_sums, *gradients]

    by_kernels = results()
    monkeypatch.setattr(attention_blocks, "_has_flash", lambda *_: False)
    for is_, want in zip(by_kernels, results(), strict=True):
        assert (is_.float() - want).norm() < 1e-2 * want.norm()
