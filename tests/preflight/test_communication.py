"""What GPUs send each other: bytes by link, and what is hidden, against counts by hand."""

import dataclasses

import pytest

from accbench.pjrt import gpu
from accbench.preflight import communication, hlo, kernels, summary
from accbench.preflight.communication import Links

H100 = gpu.load("h100")
# Two nodes of four; a product runs beside the gather, and nothing beside the reduction.
PROGRAM = """\
%gather (p: f32[1000]) -> f32[8000] {
  %p = f32[1000]{0} parameter(0)
  ROOT %g = f32[8000]{0} all-gather(%p), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
}

ENTRY %step (x: f32[1000], a: f32[4096,4096]) -> f32[500] {
  %x = f32[1000]{0} parameter(0)
  %a = f32[4096,4096]{1,0} parameter(1)
  %gather-start = ((f32[1000]{0}), f32[8000]{0}) async-start(%x), calls=%gather
  %dot = f32[4096,4096]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %gather-done = f32[8000]{0} async-done(%gather-start)
  %pair = f32[1000]{0} all-reduce(%x), replica_groups=[4,2]<=[8], to_apply=%sum
  ROOT %scatter = f32[500]{0} reduce-scatter(%x), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%sum
}
"""


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("{{0,1},{2,3}}", [0, 1]),
        ("[4,2]<=[8]", [0, 1]),
        ("[4,2]<=[2,4]T(1,0)", [0, 4]),
        ("[2,4]<=[2,2,2]T(1,0,2)", [0, 1, 4, 5]),
        ("", [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_groups_are_read_in_every_form_that_xla_writes(text, group):
    assert communication.parse_group(text, 8) == group


@pytest.mark.parametrize(
    ("pairs", "in_node", "network"),
    [
        ("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", 4000, 0),
        ("{{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}}", 0, 4000),  # two leave their node
        ("{{0,4},{4,0},{1,5},{5,1}}", 0, 4000),
    ],
)
def test_a_permute_waits_for_the_pair_that_leaves_its_node(pairs, in_node, network):
    text = PROGRAM.replace(
        "%pair = f32[1000]{0} all-reduce(%x), replica_groups=[4,2]<=[8], to_apply=%sum",
        f"%pair = f32[1000]{{0}} collective-permute(%x), source_target_pairs={pairs}",
    )
    links = Links(2, 4, in_node_bytes_per_s=1e8, network_bytes_per_s=1e8)
    found = communication.summarize(kernels.list_kernels(hlo.parse(text)), H100, links)
    (permute,) = (row for row in found["kinds"] if row["kind"] == "collective-permute")
    assert (permute["in_node_bytes"], permute["network_bytes"]) == (in_node, network)


@pytest.mark.parametrize(
    ("opcode", "group", "in_node", "network"),
    [
        ("all-gather", [0, 1, 2, 3], 3 * 600, 0),
        ("all-reduce", [0, 1, 2, 3], 2 * 600 * 3 / 4, 0),
        ("reduce-scatter", [0, 4], 0, 600 / 2),  # a GPU a node
        # Four rings, each of which leaves the node once in four sends.
        ("reduce-scatter", [*range(8)], 600 * 7 / 8 * 3 / 4, 600 * 7 / 8 / 4),
        ("all-to-all", [*range(8)], 600 * 3 / 8, 600 * 4 / 8),
        ("all-gather", [0], 0, 0),
    ],
)
def test_bytes_are_those_of_rings_through_nodes(opcode, group, in_node, network):
    sent = communication.sent_bytes(opcode, 600, group, gpus_per_node=4)
    assert sent[communication.IN_NODE] == pytest.approx(in_node)
    assert sent[communication.NETWORK] == pytest.approx(network)


def test_what_is_awaited_at_once_adds_to_the_bound_and_what_runs_beside_does_not():
    links = Links(2, 4, in_node_bytes_per_s=1e8, network_bytes_per_s=1e8)
    program_kernels = kernels.list_kernels(hlo.parse(PROGRAM))
    product = next(kernel for kernel in program_kernels if kernel.is_product)
    product_s = summary.bound_s(product, H100)
    found = communication.summarize(program_kernels, H100, links)
    by_kind = {row["kind"]: row for row in found["kinds"]}
    assert by_kind["all-gather"]["bytes"] == 4000 * 7
    assert by_kind["all-gather"]["network_bytes"] == 4000 * 7 / 4
    assert by_kind["all-reduce"]["in_node_bytes"] == 4000
    assert by_kind["reduce-scatter"]["network_bytes"] == 2000
    seconds = [4000 * 7 * 0.75 / 1e8, 4000 / 1e8, 2000 / 1e8]  # gather, reduction, scatter
    assert product_s > seconds[0]
    assert found["link_s"] == pytest.approx(sum(seconds))
    assert found["bound_s"] == pytest.approx(product_s + seconds[1] + seconds[2])
    assert found["overlapped"] == pytest.approx(seconds[0] / sum(seconds))
    slow = dataclasses.replace(links, in_node_bytes_per_s=1e6)
    found = communication.summarize(program_kernels, H100, slow)
    waited = 4000 * 7 * 0.75 / 1e6 - product_s
    rest = 4000 / 1e6 + seconds[2]
    assert found["bound_s"] == pytest.approx(product_s + waited + rest)
