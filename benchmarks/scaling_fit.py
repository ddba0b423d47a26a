"""A model of a training step's time on many devices: gradient reduction that overlaps computing.

It knows the step of one device, the bytes of its gradients, the links, and how much of the
reduction overlaps the backward pass. It does not know input, jitter, clocks that fall, and kernels
that wait for each other; so its times are lower bounds. docs/scaling.md compares it with published
figures.
"""

import dataclasses
import math

BUCKET_BYTES = 25 * 2**20
"""Bytes that DistributedDataParallel reduces at once (bucket_cap_mb)."""
FIRST_BUCKET_BYTES = 2**20
"""Its first bucket, small so that reducing starts early (dist._DEFAULT_FIRST_BUCKET_BYTES)."""
BACKWARD_SHARE = 2 / 3
"""Share of the backward pass in a step's operations.

It multiplies twice where a forward pass does once."""
TREE_SHARE = 0.9 * 120 / 128
"""Share of a link's rate that a tree gets: by NCCL's tuning, and by its protocol of 128 byte lines,
of which 8 are flags (NVIDIA/nccl, src/graph/tuning.cc)."""


@dataclasses.dataclass(frozen=True)
class Link:
    """A connection between neighbours of a ring or tree."""

    bytes_per_s: float
    """The rate of large messages in one direction."""
    ring_step_s: float
    """Latency of one step of a ring."""
    tree_step_s: float
    """Latency of one step of a tree."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Nodes of several devices each."""

    devices_per_node: int
    within: Link
    """The link of one device to the others of its node."""
    between: Link
    """The link of one node to the others, all its network cards together."""
    ring_start_s: float = 8.4e-6
    """Seconds that every ring reduction starts with (NCCL's tuning.cc, protocol Simple)."""
    tree_start_s: float = 4.4e-6
    """Seconds that every tree reduction starts with (NCCL's tuning.cc, protocol LL128)."""
    algorithms: tuple[str, ...] = ("ring", "tree")
    """All-reduce algorithms, keys of `ALGORITHMS`, of which the fastest is taken for each size.

    The default's are NCCL's."""


@dataclasses.dataclass(frozen=True)
class TrainingStep:
    """The training step of one device by itself."""

    compute_s: float
    """Measured with one device."""
    gradient_bytes: float
    """Bytes that each device reduces."""
    overlaps: bool = True
    """Whether buckets are reduced while the backward pass goes on, or all at its end."""
    bucket_bytes: float = BUCKET_BYTES
    small_last: bool = False
    """Whether the bucket of 1 MiB is the last instead, which is the one that cannot hide."""

    def __post_init__(self) -> None:
        if min(self.compute_s, self.gradient_bytes, self.bucket_bytes) <= 0:
            raise ValueError(f"seconds and bytes of a step must be above 0: {self}")


@dataclasses.dataclass(frozen=True)
class ScaledStep:
    """The same step on many devices."""

    step_s: float
    reduction_s: float
    """Seconds of all buckets, hidden or not."""
    efficiency: float
    """The one-device step time over this one, 0..1."""
    bound_by_reduction: bool
    """Whether reducing takes longer than the backward pass that could hide it."""


def ring_s(num_bytes: float, cluster: Cluster, num_devices: int) -> float:
    """Compute the seconds of an all-reduce around rings through all devices.

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
    """Compute the seconds of a hierarchical all-reduce.

    It is a reduce-scatter in each node, an all-reduce of the shards between nodes, and an
    all-gather in each, one after the other: fewer steps than a ring through all devices, but no
    link works throughout. Source: as `ring_s`, for each of the three.
    """
    nodes = _nodes(cluster, num_devices)
    in_node = dataclasses.replace(cluster, between=cluster.within)
    shards_s = ring_s(num_bytes, in_node, min(num_devices, cluster.devices_per_node))
    if nodes == 1:
        return shards_s
    node_cluster = dataclasses.replace(cluster, devices_per_node=1, within=cluster.between)
    return shards_s + ring_s(num_bytes, node_cluster, nodes)


def tree_s(num_bytes: float, cluster: Cluster, num_devices: int) -> float:
    """Compute the seconds of an all-reduce by two trees of nodes, each with half of the bytes.

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


ALGORITHMS = {"ring": ring_s, "hierarchical": hierarchical_s, "tree": tree_s}


def all_reduce_s(num_bytes: float, cluster: Cluster, num_devices: int) -> float:
    """Compute the seconds of an all-reduce by the cluster's fastest algorithm for that size."""
    return min(
        ALGORITHMS[algorithm](num_bytes, cluster, num_devices) for algorithm in cluster.algorithms
    )


def buckets(step: TrainingStep) -> list[float]:
    """Return the bytes of each reduction of a step, in the order of the backward pass."""
    if not step.overlaps:
        return [step.gradient_bytes]
    sizes = [min(FIRST_BUCKET_BYTES, step.bucket_bytes, step.gradient_bytes)]
    left = step.gradient_bytes - sizes[0]
    num_full = int(left // step.bucket_bytes)
    rest = left - num_full * step.bucket_bytes
    sizes += [step.bucket_bytes] * num_full + ([rest] if rest > 0 else [])
    return sizes[::-1] if step.small_last else sizes


def scale_step(step: TrainingStep, cluster: Cluster, num_devices: int) -> ScaledStep:
    """Compute the step on `num_devices`, each with as much work as the one.

    A bucket is ready when the backward pass has computed its bytes, which it does evenly, and its
    reduction starts when the one before is done: so the last one never hides. Source: Li et al.,
    PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020 (arXiv
    2006.15704).
    """
    backward_s = step.compute_s * BACKWARD_SHARE
    ready_bytes, end_s, reduction_s = 0.0, 0.0, 0.0
    for size in buckets(step):
        ready_bytes += size
        ready_s = step.compute_s - backward_s * (1 - ready_bytes / step.gradient_bytes)
        bucket_s = all_reduce_s(size, cluster, num_devices)
        end_s = max(end_s, ready_s) + bucket_s
        reduction_s += bucket_s
    step_s = max(end_s, step.compute_s)
    return ScaledStep(step_s, reduction_s, step.compute_s / step_s, reduction_s > backward_s)


def replicated_step_s(step: TrainingStep, link: Link) -> float:
    """Compute the least time of a step of torch.nn.DataParallel on GPUs of one node.

    Parameters are broadcast before the forward pass begins, and gradients reduced to the first GPU
    when the backward pass is over, for one function of autograd holds all of them: nothing hides.
    Each of the two sends all bytes through a link of a ring. Python's lock, which the threads of
    the GPUs share, and the outputs that the first GPU gathers come on top.

    Source: torch/nn/parallel, replicate.py and _functions.py (Broadcast, ReduceAddCoalesced).
    """
    return step.compute_s + 2 * step.gradient_bytes / link.bytes_per_s


def least_compute_s(step: TrainingStep, cluster: Cluster, num_devices: int) -> float:
    """Return the one-device step time below which reducing takes longer than the backward pass."""
    reduction_s = sum(all_reduce_s(size, cluster, num_devices) for size in buckets(step))
    return reduction_s / BACKWARD_SHARE


def _nodes(cluster: Cluster, num_devices: int) -> int:
    if num_devices < 1:
        raise ValueError(f"{num_devices} devices")
    return math.ceil(num_devices / cluster.devices_per_node)
