"""Ring attention is attention: four processes with parts of sequences, beside whole ones."""

import json

import pytest
import torch

from accbench.distributed import attention_blocks
from accbench.distributed.collectives import RankGroup
from accbench.distributed.ring_attention import chunks_per_rank
from tests.conftest import ROOT, several_ranks
from tests.scripts.ring_attention_ranks import CASES


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("ring")
    script = ROOT / "tests" / "scripts" / "ring_attention_ranks.py"
    done = several_ranks(4, script, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_attention_and_gradients_are_those_of_whole_sequences(found, name):
    case = CASES[name]
    # Of bfloat16 what is rounded to it once: 2 ** -9 of each number at most.
    bar = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 3e-3}
    of = found[name]
    for result in ("out", "q", "k", "v"):
        assert of[result] < (1e-2 if case.autocast else bar[case.dtype]), result


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
