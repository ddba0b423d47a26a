"""The search for meshes: which there are, what they need, and in which order they are tried."""

import dataclasses
from typing import Any

import pytest

from accbench.config import TaskConfig
from accbench.engines.jax.options import JaxOptions
from accbench.errors import RequestError
from accbench.preflight import mesh_search
from accbench.preflight.communication import Links

LINKS = Links(2, 4, in_node_bytes_per_s=450e9, network_bytes_per_s=50e9)
GIB = 2**30


def task(**changes: Any) -> TaskConfig:
    flags = {"engine": "jax", "device": "cuda", "model": "llama_tiny", "batch_size": 2,
             "nproc_per_node": 4, "nnodes": "2", "dp_shard": "auto"}  # fmt: skip
    return TaskConfig(**{**flags, **changes})


def found(**changes: Any) -> tuple[dict[str, mesh_search.CandidateMesh], list[str]]:
    meshes, refused = mesh_search.candidates(task(**changes), LINKS, 512, flops=1e9)
    return {mesh.name: mesh for mesh in meshes}, refused


def test_meshes_keep_the_samples_and_what_cannot_be_is_told():
    pytest.importorskip("transformers")
    meshes, refused = found()
    assert set(meshes) == {
        "replicas", "--dp_shard auto", "--tp 2", "--dp_shard auto --tp 2", "--cp 2",
        "--dp_shard auto --cp 2",
        # By a ring as many GPUs share a sequence as there are, whatever its heads.
        *(f"{words} --cp_attention ring" for words in (
            "--cp 2", "--dp_shard auto --cp 2", "--cp 4", "--dp_shard auto --cp 4", "--tp 2 --cp 2",
            "--dp_shard auto --tp 2 --cp 2",
        )),
    }  # fmt: skip
    assert meshes["replicas"].batch_size == 2
    assert meshes["--tp 2"].batch_size == 4  # of two GPUs
    assert any(why.startswith("tp 4, cp 1: --tp 4: ") and "2 heads" in why for why in refused)
    weights = meshes["replicas"].weight_bytes
    assert meshes["replicas"].state_bytes == 3 * weights  # AdamW's moments too
    assert meshes["--dp_shard auto"].state_bytes == 3 * weights // 8
    halves = meshes["--dp_shard auto --tp 2"]
    assert 0.5 * weights < halves.weight_bytes < 0.55 * weights  # norms are whole
    assert halves.state_bytes == 3 * halves.weight_bytes // 4
    assert halves.task(task()).batch_size == 4
    assert halves.is_of(task(tp=2))
    # Where each layer's weights are gathered by themselves, half of all are whole at a time.
    late, _ = found(options={"jax": JaxOptions(gather="layers")})
    assert late["--dp_shard auto"].weight_bytes == weights // 2
    assert late["replicas"].weight_bytes == weights


def test_shards_need_gpus_that_tp_and_cp_leave():
    pytest.importorskip("transformers")
    node = dataclasses.replace(LINKS, num_nodes=1, gpus_per_node=2)
    meshes, _ = mesh_search.candidates(task(nproc_per_node=2, nnodes="1"), node, 512, flops=1e9)
    names = {mesh.name for mesh in meshes}
    assert names == {
        "replicas", "--dp_shard auto", "--tp 2", "--cp 2", "--cp 2 --cp_attention ring"
    }  # fmt: skip


def test_few_samples_need_ranks_that_share_them():
    pytest.importorskip("transformers")
    meshes, refused = found(batch_size=1, tp=2)
    assert not {"replicas", "--dp_shard auto"} & set(meshes)
    assert meshes["--tp 2"].batch_size == 1
    assert any("4 samples a step are no multiple of 8 GPUs" in why for why in refused)


def test_sequences_are_shared_where_layers_are():
    pytest.importorskip("transformers")
    asked = {"sequence_parallel": True, "tp": 2}
    meshes, _ = found(**asked)
    assert meshes["--tp 2"].task(task(**asked)).sequence_parallel
    assert not meshes["replicas"].task(task(**asked)).sequence_parallel
    meshes, refused = found(**asked, seq_len=31)
    assert "replicas" in meshes
    assert "--tp 2" not in meshes
    assert any("--seq_len 31 is no multiple of --tp 2" in why for why in refused)


def test_a_ring_sends_keys_and_values_and_the_gradients_of_these():
    pytest.importorskip("transformers")
    node = dataclasses.replace(LINKS, num_nodes=1, gpus_per_node=2)
    one_node = {"nproc_per_node": 2, "nnodes": "1", "dp_shard": None}
    meshes, _ = mesh_search.candidates(task(**one_node), node, 512, flops=1e12)
    by_name = {mesh.name: mesh for mesh in meshes}
    ulysses, ring = by_name["--cp 2"], by_name["--cp 2 --cp_attention ring"]
    # Of two layers: heads of 16, four of queries and two of keys. A GPU sends half of queries,
    # keys, values and results of width 64 in 16 bits, twice; or keys and values twice, and their
    # gradients in 32 bits to the other GPU and home.
    tokens = 1e12 / 6 / (by_name["replicas"].weight_bytes / 4)
    exchanged, passed_on = 8 * 64 * 2 / 2, 2 * 2 * 16 * (2 * 2 + 2 * 4)
    more = 2 * tokens * (passed_on - exchanged) / node.in_node_bytes_per_s
    assert ring.link_s - ulysses.link_s == pytest.approx(more)
    assert ring.task(task(**one_node)).cp_attention == "ring"
    assert ring.is_of(task(**one_node, cp=2, cp_attention="ring"))
    assert not ulysses.is_of(task(**one_node, cp=2, cp_attention="ring"))


def mesh(is_sharded: bool, tp: int, state_gib: float, link_s: float) -> Any:
    return mesh_search.CandidateMesh(
        is_sharded, tp, 1, "ulysses", tp, int(state_gib * GIB), int(8 / tp * GIB), link_s
    )


def result(peak_gib: float, bound_s: float, memory_gib: float = 80) -> dict[str, Any]:
    return {
        "memory": {"temporaries_bytes": int(20 * GIB), "peak_bytes": int(peak_gib * GIB),
                   "fits": peak_gib <= memory_gib},
        "communication": {"bound_s": bound_s, "link_s": 0.5, "overlapped": 0.5},
        "step": {"bound_s": 1.0},
    }  # fmt: skip


WHOLE = mesh(False, 1, 96, 0.5)
SHARDED, SLICED, BOTH = mesh(True, 1, 12, 0.6), mesh(True, 2, 12, 0.2), mesh(True, 4, 12, 0.9)


def test_the_most_promising_are_compiled_and_the_rest_are_estimated():
    compiled = []

    def compile_mesh(asked: Any) -> dict[str, Any]:
        compiled.append(asked)
        return result(30, 1.05)

    meshes = [WHOLE, SHARDED, SLICED, BOTH]
    known = {WHOLE: result(116, 1.25)}
    search = mesh_search.search(meshes, compile_mesh, known, 80 * GIB, tries=1)
    assert compiled == [SLICED]  # the least bytes of those that are estimated to fit
    rows = search["meshes"]
    assert [row["name"] for row in rows] == [m.name for m in (SLICED, SHARDED, BOTH, WHOLE)]
    assert [row["how"] for row in rows] == ["compiled", "estimated", "estimated", "compiled"]
    assert [row["fits"] for row in rows] == [True, True, True, False]
    # 12 GiB of activations where tp is 1, and the weights that it leaves.
    assert rows[1]["temporaries_bytes"] == (12 + 8) * GIB
    assert rows[1]["bound_s"] == pytest.approx(1 + 0.6 / 2)


def test_nothing_is_compiled_that_cannot_be_better_and_errors_are_kept():
    known = {SLICED: result(30, 1.05)}
    never = pytest.fail
    search = mesh_search.search([WHOLE, SHARDED, SLICED], never, known, 80 * GIB, tries=3)
    assert search["meshes"][0]["how"] == "compiled"

    def refuse(_: Any) -> dict[str, Any]:
        raise RequestError("the compiler ended")

    better = dataclasses.replace(SHARDED, link_s=0.01)
    search = mesh_search.search([better, SLICED], refuse, known, 80 * GIB, tries=3)
    assert search["failed"] == ["--dp_shard auto: the compiler ended"]
