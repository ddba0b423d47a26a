"""Count what GPUs send each other in a compiled step, by link, and what of it kernels hide.

Bytes are those of rings, as NCCL lays them: of n ranks each sends (n - 1) / n of what it gathers
or scatters, and twice that of what it reduces. A ring goes through a node's GPUs before it goes on
to the next node. With k of its GPUs in a node, NCCL has k such rings, each of which leaves the node
at another GPU: each GPU sends 1 / k of its bytes to another node. In a permute each GPU sends all
to one other; where one of these pairs lies in two nodes, the others wait for it.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from accbench.pjrt.gpu import GpuSpec
from accbench.preflight import kernels, summary
from accbench.preflight.kernels import Kernel

IN_NODE, NETWORK = "in_node", "network"
_LISTED = re.compile(r"\{([\d,]+)\}")
_IOTA = re.compile(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


@dataclasses.dataclass(frozen=True)
class Links:
    """Holds how GPUs are connected."""

    num_nodes: int
    gpus_per_node: int
    in_node_bytes_per_s: float
    """Rate to the other GPUs of the node, in one direction."""
    network_bytes_per_s: float
    """Rate of each GPU to other nodes, in one direction."""

    @classmethod
    def of(cls, gpu: GpuSpec, num_nodes: int, gpus_per_node: int, gbit_per_s: float) -> "Links":
        """Return the links of a cluster whose GPUs each have so much network."""
        in_node = 1e9 * gpu.in_node_gb_per_s
        return cls(num_nodes, gpus_per_node, in_node, 1e9 * gbit_per_s / 8)

    def seconds(self, sent: dict[str, float]) -> dict[str, float]:
        """Return how long each link takes to send its bytes at full rate."""
        rates = {IN_NODE: self.in_node_bytes_per_s, NETWORK: self.network_bytes_per_s}
        return {link: num_bytes / rates[link] for link, num_bytes in sent.items() if num_bytes}


def ring_bytes(opcode: str, operand_bytes: float, num_ranks: int) -> float:
    """Return the bytes that each rank sends in a collective."""
    if num_ranks < 2:
        return 0.0
    if opcode.startswith("all-gather"):
        return operand_bytes * (num_ranks - 1)
    if opcode.startswith("collective-permute"):
        return operand_bytes
    times = 2 if opcode.startswith("all-reduce") else 1
    return times * operand_bytes * (num_ranks - 1) / num_ranks


def sent_bytes(
    opcode: str, operand_bytes: float, group: Sequence[int], gpus_per_node: int
) -> dict[str, float]:
    """Return the bytes that a GPU sends in a collective, by link.

    Args:
        opcode: XLA's, such as `all-gather`.
        operand_bytes: of a GPU's operands.
        group: the ranks that take part.
        gpus_per_node: neighbouring ranks that share a node.
    """
    total = ring_bytes(opcode, operand_bytes, len(group))
    nodes = [rank // gpus_per_node for rank in group]
    if len(set(nodes)) == 1:
        return {IN_NODE: total, NETWORK: 0.0}
    num_in_node = max(nodes.count(node) for node in set(nodes))
    share = 1 / num_in_node
    if opcode.startswith("all-to-all"):  # by pairs of ranks, not by rings
        share = (len(group) - num_in_node) / (len(group) - 1)
    return {IN_NODE: total * (1 - share), NETWORK: total * share}


def slowest_pair(text: str, gpus_per_node: int) -> list[int]:
    """Return the pair of ranks that a permute's others wait for: one in two nodes, if there is one.

    Args:
        text: the permute's `source_target_pairs`.
        gpus_per_node: neighbouring ranks that share a node.
    """
    pairs = [[int(rank) for rank in pair.split(",")] for pair in _LISTED.findall(text)]
    return max(pairs, key=lambda pair: len({rank // gpus_per_node for rank in pair}))


def parse_group(text: str, num_ranks: int) -> list[int]:
    """Return the first of an instruction's groups of ranks; `text` is its `replica_groups`."""
    listed, iota = _LISTED.search(text), _IOTA.search(text)
    if listed is not None:
        return [int(rank) for rank in listed[1].split(",")]
    if iota is None:
        return [*range(num_ranks)]
    sizes = [int(size) for size in iota[3].split(",")]
    ranks = np.arange(np.prod(sizes)).reshape(sizes)
    if iota[4]:
        ranks = ranks.transpose([int(axis) for axis in iota[4].split(",")])
    first: list[int] = ranks.reshape(int(iota[1]), int(iota[2]))[0].tolist()
    return first


def summarize(program_kernels: Sequence[Kernel], gpu: GpuSpec, links: Links) -> dict[str, Any]:
    """Summarise a step's collectives, and bound the step with the time that they add.

    Kernels run in the program's order, each in its least time. A collective runs beside them from
    its start until it is waited for, at its links' full rate, after those before it on its links.

    Args:
        program_kernels: in the order in which they run.
        gpu: the GPU that runs them.
        links: between GPUs.
    """
    collectives = [k for k in program_kernels if k.kind in kernels.BETWEEN_GPUS]
    sent = {id(kernel): _sent(kernel, links) for kernel in collectives}
    by_kind: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in collectives:
        by_kind[kernel.opcode].append(kernel)
    compute_s = sum(summary.bound_s(kernel, gpu) for kernel in program_kernels)
    bound_s = _bound_s(program_kernels, gpu, links, sent)
    link_s = sum(max(links.seconds(s).values(), default=0.0) for s in sent.values())
    hidden_s = max(0.0, link_s - (bound_s - compute_s))
    return {
        "num_nodes": links.num_nodes,
        "gpus_per_node": links.gpus_per_node,
        "in_node_gb_per_s": links.in_node_bytes_per_s / 1e9,
        "network_gb_per_s": links.network_bytes_per_s / 1e9,
        "kinds": [
            {
                "kind": kind,
                "collectives": sum(kernel.repeats for kernel in group),
                "bytes": _total(group, sent),
                "in_node_bytes": _total(group, sent, IN_NODE),
                "network_bytes": _total(group, sent, NETWORK),
            }
            for kind, group in sorted(by_kind.items())
        ],
        "in_node_bytes": _total(collectives, sent, IN_NODE),
        "network_bytes": _total(collectives, sent, NETWORK),
        "link_s": link_s,
        "overlapped": hidden_s / link_s if link_s else 1.0,
        "bound_s": bound_s,
    }


def _sent(kernel: Kernel, links: Links) -> dict[str, float]:
    num_ranks = links.num_nodes * links.gpus_per_node
    if kernel.opcode.startswith("collective-permute"):
        group = slowest_pair(kernel.replica_groups, links.gpus_per_node)
    else:
        group = parse_group(kernel.replica_groups, num_ranks)
    sent = sent_bytes(kernel.opcode, kernel.num_bytes, group, links.gpus_per_node)
    return {link: num_bytes * kernel.repeats for link, num_bytes in sent.items()}


def _total(group: Sequence[Kernel], sent: dict[int, dict[str, float]], link: str = "") -> int:
    links = (link,) if link else (IN_NODE, NETWORK)
    return round(sum(sent[id(kernel)][name] for kernel in group for name in links))


def _bound_s(
    program_kernels: Sequence[Kernel], gpu: GpuSpec, links: Links, sent: dict[int, dict[str, float]]
) -> float:
    """Return when the last kernel and the last collective end."""
    awaited = {name for kernel in program_kernels for name in kernel.waits_for}
    now = 0.0
    free: dict[str, float] = defaultdict(float)
    ends: dict[str, float] = {}
    for kernel in program_kernels:
        if kernel.kind == kernels.DONE:
            now = max([now, *_known(ends, kernel.waits_for)])
        elif id(kernel) in sent:
            seconds = links.seconds(sent[id(kernel)])
            begin = max([now, *(free[link] for link in seconds)])
            free.update({link: begin + link_s for link, link_s in seconds.items()})
            ends[kernel.name] = begin + max(seconds.values(), default=0.0)
            now = now if kernel.name in awaited else ends[kernel.name]
        else:
            now += summary.bound_s(kernel, gpu)
    return max([now, *ends.values()])


def _known(ends: dict[str, float], names: Sequence[str]) -> Iterator[float]:
    return (ends[name] for name in names if name in ends)
