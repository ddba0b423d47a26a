"""How long a training step takes on many devices: a model of reducing gradients beside computing.

What it knows: the step of one device, the bytes of its gradients, the links, and how much of the
reduction runs beside the backward pass. What it does not know: input, jitter, clocks that fall,
and kernels that wait for each other; so it tells what is at best. docs/scaling.md holds it
against published figures.
"""

import dataclasses
import math

BUCKET_BYTES = 25 * 2**20
"""What DistributedDataParallel reduces at once (bucket_cap_mb)."""
FIRST_BUCKET_BYTES = 2**20
"""Its first bucket, small so that reducing starts early (dist._DEFAULT_FIRST_BUCKET_BYTES)."""
BACKWARD_SHARE = 2 / 3
"""Of a step's operations: a backward pass multiplies twice where a forward pass does once."""
TREE_SHARE = 0.9 * 120 / 128
"""What a tree gets of a link's rate: by NCCL's tuning, and by its protocol of 128 byte lines, of
which 8 are flags (NVIDIA/nccl, src/graph/tuning.cc)."""


@dataclasses.dataclass(frozen=True)
class Link:
    """Between neighbours of a ring or tree."""

    bytes_per_s: float
    """In one direction, as large messages reach it."""
    ring_step_s: float
    """Latency of one step of a ring."""
    tree_step_s: float
    """Latency of one step of a tree."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Nodes of several devices each."""

    devices_per_node: int
    within: Link
    """What one device has to the others of its node."""
    between: Link
    """What one node has to the others, all its network cards together."""
    ring_start_s: float = 8.4e-6
    """Of every reduction (NCCL's tuning.cc, protocol Simple)."""
    tree_start_s: float = 4.4e-6
    """Likewise (protocol LL128)."""
    ways: tuple[str, ...] = ("ring", "tree")
    """Of reducing, from `WAYS`, of which the fastest is taken for each size; these are NCCL's."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of one device by itself."""

    compute_s: float
    """Measured with one device."""
    gradient_bytes: float
    """That each device reduces."""
    overlaps: bool = True
    """Whether buckets are reduced while the backward pass goes on, or all at its end."""
    bucket_bytes: float = BUCKET_BYTES
    small_last: bool = False
    """Whether the bucket of 1 MiB is the last instead, which is the one that cannot hide."""

    def __post_init__(self) -> None:
        if min(self.compute_s, self.gradient_bytes, self.bucket_bytes) <= 0:
            raise ValueError(f"seconds and bytes of a step must be above 0: {self}")


@dataclasses.dataclass(frozen=True)
class Scaled:
    """The same step on many devices."""

    step_s: float
    reduction_s: float
    """Of all buckets, hidden or not."""
    efficiency: float
    """The step of one device by itself over this one, 0..1."""
    bound_by_reduction: bool
    """Whether reducing takes longer than the backward pass that could hide it."""


def ring_s(num_bytes: float, cluster: Cluster, num_devices: int) -> float:
    """An all-reduce around rings through all devices, in seconds.

    Each device sends 2 (N - 1) / N of the bytes, at the rate of the slowest link. With a ring for
    each network card a node sends what one device of it does, through all of its cards.

    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009; the bus bandwidth of
    NVIDIA/nccl-tests, doc/PERFORMANCE.md; the steps of its latency as NCCL's tuning.cc has them.
    """
    nodes = _nodes(cluster, num_devices)
    if num_devices == 1:
        return 0.0
    rate = cluster.within.bytes_per_s
    if nodes > 1:
        rate = min(rate, cluster.between.bytes_per_s)
    between_steps = 2 * (nodes - 1)
    within_steps = 2 * (num_devices - 1) - between_steps
    latency_s = within_steps * cluster.within.ring_step_s + between_steps * (
        cluster.between.ring_step_s
    )
    sent = 2 * (num_devices - 1) / num_devices * num_bytes
    return cluster.ring_start_s + latency_s + sent / rate


def hierarchical_s(num_bytes: float, cluster: Cluster, num_devices: int) -> float:
    """Reduce-scatter in each node, all-reduce of the shares between nodes, all-gather in each.

    One after the other: fewer steps than a ring through all devices, but no link works throughout.
    Source: as `ring_s`, for each of the three.
    """
    nodes = _nodes(cluster, num_devices)
    in_node = dataclasses.replace(cluster, between=cluster.within)
    shares_s = ring_s(num_bytes, in_node, min(num_devices, cluster.devices_per_node))
    if nodes == 1:
        return shares_s
    of_nodes = dataclasses.replace(cluster, devices_per_node=1, within=cluster.between)
    return shares_s + ring_s(num_bytes, of_nodes, nodes)


def tree_s(num_bytes: float, cluster: Cluster, num_devices: int) -> float:
    """An all-reduce up and down two trees of nodes, each with half of the bytes.

    Few steps, for small buckets on many nodes; twice the bytes at less than a link's whole rate.

    Source: Sanders, Speck and Traeff, Two-tree algorithms for full bandwidth broadcast, reduction
    and scan, 2009; steps and rates as NCCL's tuning.cc has them.
    """
    nodes = _nodes(cluster, num_devices)
    if num_devices == 1:
        return 0.0
    rate = cluster.within.bytes_per_s
    if nodes > 1:
        rate = min(rate, cluster.between.bytes_per_s)
    within_steps = 2 * (min(num_devices, cluster.devices_per_node) - 1)
    between_steps = 2 * math.ceil(math.log2(nodes))
    latency_s = within_steps * cluster.within.tree_step_s + between_steps * (
        cluster.between.tree_step_s
    )
    return cluster.tree_start_s + latency_s + 2 * num_bytes / (rate * TREE_SHARE)


WAYS = {"ring": ring_s, "hierarchical": hierarchical_s, "tree": tree_s}


def all_reduce_s(num_bytes: float, cluster: Cluster, num_devices: int) -> float:
    """By the fastest way that the cluster has for so many bytes."""
    return min(WAYS[way](num_bytes, cluster, num_devices) for way in cluster.ways)


def buckets(step: Step) -> list[float]:
    """Bytes of each reduction of a step, in the order of the backward pass."""
    if not step.overlaps:
        return [step.gradient_bytes]
    sizes = [min(FIRST_BUCKET_BYTES, step.bucket_bytes, step.gradient_bytes)]
    left = step.gradient_bytes - sizes[0]
    whole = int(left // step.bucket_bytes)
    rest = left - whole * step.bucket_bytes
    sizes += [step.bucket_bytes] * whole + ([rest] if rest > 0 else [])
    return sizes[::-1] if step.small_last else sizes


def scaled(step: Step, cluster: Cluster, num_devices: int) -> Scaled:
    """The step on `num_devices`, each with as much work as the one.

    A bucket is ready when the backward pass has made its bytes, which it makes evenly, and is
    reduced when the one before is: so the last one never hides. Source: Li et al., PyTorch
    Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020 (arXiv 2006.15704).
    """
    backward_s = step.compute_s * BACKWARD_SHARE
    made, end_s, reduction_s = 0.0, 0.0, 0.0
    for size in buckets(step):
        made += size
        ready_s = step.compute_s - backward_s * (1 - made / step.gradient_bytes)
        one_s = all_reduce_s(size, cluster, num_devices)
        end_s = max(end_s, ready_s) + one_s
        reduction_s += one_s
    step_s = max(end_s, step.compute_s)
    return Scaled(step_s, reduction_s, step.compute_s / step_s, reduction_s > backward_s)


def least_compute_s(step: Step, cluster: Cluster, num_devices: int) -> float:
    """The step of one device below which reducing takes longer than the backward pass."""
    reduction_s = sum(all_reduce_s(size, cluster, num_devices) for size in buckets(step))
    return reduction_s / BACKWARD_SHARE


def _nodes(cluster: Cluster, num_devices: int) -> int:
    if num_devices < 1:
        raise ValueError(f"{num_devices} devices")
    return math.ceil(num_devices / cluster.devices_per_node)
