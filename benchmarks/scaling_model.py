"""The model of many devices held against published figures, and what it predicts.

    python benchmarks/scaling_model.py [--keep RESULT ...]

Prints the tables of docs/scaling.md; takes a moment and needs no device. What the steps of
ResNet-50 and Llama send and need comes from `accbench preflight`: scaling_steps.json has its
figures, and --keep takes new ones from its results (--format json).
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.scaling_fit import (  # noqa: E402
    ALGORITHMS,
    BUCKET_BYTES,
    Cluster,
    Link,
    TrainingStep,
    least_compute_s,
    replicated_step_s,
    scale_step,
)

STEPS_FILE = Path(__file__).with_name("scaling_steps.json")

# What NCCL reaches of a link's rate on H100: 370 of NVLink's 450 GB/s (NVIDIA/nccl-tests issue 212)
# and 47 of a 400 Gb/s card's 50 GB/s (issue 290). Taken for other generations as well.
NVLINK_SHARE, NETWORK_SHARE = 370 / 450, 47 / 50
NUM_DEVICES = (8, 64, 1024)


def nvlink(gb_per_s: float) -> Link:
    """Of a rate in one direction; latencies from NCCL's tuning.cc (ring: Simple, tree: LL128)."""
    return Link(gb_per_s * 1e9 * NVLINK_SHARE, ring_step_s=3.4e-6, tree_step_s=1.2e-6)


def network(gbit_per_s: float) -> Link:
    """Of all cards of a node."""
    return Link(gbit_per_s / 8 * 1e9 * NETWORK_SHARE, ring_step_s=9.6e-6, tree_step_s=8.5e-6)


def pcie(gb_per_s: float) -> Link:
    return Link(gb_per_s * 1e9, ring_step_s=5.7e-6, tree_step_s=1.9e-6)


@dataclasses.dataclass(frozen=True)
class PreflightStep:
    """The figures of a step that preflight has compiled for several GPUs of one node."""

    model: str
    engine: str
    gpu: str
    num_gpus: int
    num_parameters: int
    units: int
    """Images or tokens of a GPU."""
    sent_bytes: int
    """Bytes that each GPU sends."""
    bound_s: float
    """Least time of its kernels."""
    versions: dict[str, str]

    @property
    def gradient_bytes(self) -> float:
        """The bytes of which a ring's all-reduce sends as many.

        Sharded parameters that are gathered and gradients that are scattered count alike.
        """
        return self.sent_bytes * self.num_gpus / (2 * (self.num_gpus - 1))

    @classmethod
    def of_result(cls, result: dict[str, Any]) -> "PreflightStep":
        """Return the figures of a result of `accbench preflight`."""
        model, sent = result["model"], result["communication"]
        return cls(
            result["task"]["model"], result["engine"], result["gpu"]["name"], result["num_gpus"],
            model["num_parameters"], result["step"]["samples"] * model["units_per_sample"],
            sent["in_node_bytes"] + sent["network_bytes"], result["step"]["bound_s"],
            result["versions"],
        )  # fmt: skip


def read_steps() -> dict[str, PreflightStep]:
    """Return the kept steps by their models' names."""
    return {
        name: PreflightStep(**step) for name, step in json.loads(STEPS_FILE.read_text()).items()
    }


def keep(paths: Sequence[Path]) -> None:
    """Take new figures from results of preflight."""
    steps = read_steps()
    for path in paths:
        step = PreflightStep.of_result(json.loads(path.read_text()))
        steps[step.model] = step
    text = json.dumps({name: dataclasses.asdict(step) for name, step in steps.items()}, indent=1)
    STEPS_FILE.write_text(text + "\n")


@dataclasses.dataclass(frozen=True)
class Published:
    """Throughputs at two numbers of devices."""

    what: str
    cluster: Cluster
    step: TrainingStep
    few: int
    many: int
    efficiency: float
    """Throughput a device with many over that with few."""


# Reduced in each server, then by Gloo between them.
P100 = Cluster(8, nvlink(80), network(50), algorithms=("hierarchical",))
V100 = Cluster(8, nvlink(150), network(100))
A100 = Cluster(8, nvlink(300), network(1600))
H100 = Cluster(8, nvlink(450), network(3200))
# NCCL had no trees in 2017. Its servers' inner links are not told; the network is slower than any.
PASCAL_25 = Cluster(4, pcie(12), network(25), algorithms=("ring",))

STEPS = read_steps()
RESNET50, LLAMA = STEPS["resnet50"], STEPS["llama_1b"]
# Of models whose published runs are held against; no step of theirs is compiled here.
VGG_BYTES = 4 * 138.4e6
BERT_BYTES = 4 * 110.1e6
# Sharded data parallelism gathers parameters twice and scatters gradients once: three times what
# crosses a link once, where an all-reduce is two.
MPT_BYTES = 1.5 * 2 * 1.316e9


def resnet(what: str, cluster: Cluster, batch: int, few: float, many: float, num: int) -> Published:
    """Samples/s of one device and of `num`."""
    step = TrainingStep(batch / few, RESNET50.gradient_bytes)
    return Published(f"ResNet-50, {what}", cluster, step, 1, num, many / num / few)


def bert(what: str, batch: int, few: float, many: float, num: int, of: float = 1) -> Published:
    """Likewise; its script reduces 250 million gradients at once, which is all of them."""
    step = TrainingStep(batch / few, of * BERT_BYTES, overlaps=False)
    return Published(f"BERT-base, {what}", V100, step, 1, num, many / num / few)


def mpt(what: str, cluster: Cluster, sequences: int, few: tuple[int, float], many: tuple[int, float]
        ) -> Published:  # fmt: skip
    """(Devices, tokens/s a device) twice."""
    step = TrainingStep(sequences * 2048 / few[1], MPT_BYTES)
    return Published(f"MPT-1B, {what}", cluster, step, few[0], many[0], many[1] / few[1])


PUBLISHED = (
    resnet("V100, FP32 [1]", V100, 112, 367, 2855, 8),
    resnet("V100, AMP [1]", V100, 256, 1200, 8322, 8),
    resnet("A100, TF32 [1]", A100, 256, 938, 7248, 8),
    resnet("A100, AMP [1]", A100, 256, 2470, 16621, 8),
    Published(
        "VGG-16, P100, FP32 [2]", P100, TrainingStep(64 / 154, VGG_BYTES), 1, 8, 1081 / 8 / 154
    ),
    resnet("V100, FP32 [3]", V100, 128, 367.29, 2887.65, 8),
    resnet("V100, FP32 [3]", V100, 128, 367.29, 10917.09, 32),
    resnet("V100, AMP [3]", V100, 256, 802.9, 6154.66, 8),
    resnet("V100, AMP [3]", V100, 256, 802.9, 22551.16, 32),
    # Its backward pass takes 120 ms.
    Published(
        "ResNet-50, P100, FP32 [4]",
        P100,
        TrainingStep(0.18, RESNET50.gradient_bytes),
        8,
        256,
        0.90,
    ),
    # Of one device: [2].
    Published(
        "Inception V3, Pascal, FP32 [5]",
        PASCAL_25,
        TrainingStep(64 / 142, 4 * 23.8e6),
        1,
        512,
        0.90,
    ),
    Published(
        "VGG-16, Pascal, FP32 [5]", PASCAL_25, TrainingStep(64 / 154, VGG_BYTES), 1, 512, 0.68
    ),
    bert("V100, FP32, batch 32 [6]", 32, 119.6, 921.32, 8),
    bert("V100, FP32, batch 32 [6]", 32, 119.6, 1499.4, 16),
    bert("V100, FP32, batch 32 [6]", 32, 119.6, 2885.81, 32),
    bert("V100, FP32, batch 48 [6]", 48, 121.94, 3039.3, 32),
    bert("V100, FP16, batch 64 [6]", 64, 444.51, 9331.72, 32, of=0.5),
    bert("V100, FP16, batch 96 [6]", 96, 462.35, 10349.12, 32, of=0.5),
    mpt("A100, BF16, sharded [7]", A100, 8, (16, 19085), (128, 18647)),
    mpt("H100, BF16, sharded [7]", H100, 20, (16, 46037), (64, 44402)),
)

NETWORKS = {
    "400 Gb/s a GPU": H100,
    "100 Gb/s a node": dataclasses.replace(H100, between=network(100)),
    "25 Gb/s a node": dataclasses.replace(H100, between=network(25)),
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a device trains in a step, and how fast."""

    name: str
    preflight: PreflightStep
    unit: str
    per_s: float
    """Units a second of one device."""
    units: int
    """Of one device and step."""
    global_units: int
    """Of all devices and a step, as large as training usually bears."""
    bucket_bytes: float = BUCKET_BYTES
    small_last: bool = False


# The most that a compiled step could do.
RESNET50_PER_S = RESNET50.units / RESNET50.bound_s
# MPT-1B reaches 59,800 tokens/s on eight H100 [7], times its 1.316e9 parameters over 1e9.
LLAMA_PER_S = 59_800e9 / LLAMA.num_parameters
WORKLOADS = (
    # Lambda's figure for an H200, eager PyTorch with autocast.
    Workload("ResNet-50 at 3,079 images/s", RESNET50, "images", 3079, 256, 32768),
    Workload(
        f"ResNet-50 at {RESNET50_PER_S:,.0f} images/s",
        RESNET50,
        "images",
        RESNET50_PER_S,
        256,
        32768,
        bucket_bytes=20 * 2**20,
        small_last=True,
    ),  # as --engine xla has them
    Workload(
        f"Llama of {LLAMA.num_parameters / 1e9:.1f}e9 parameters at {LLAMA_PER_S:,.0f} tokens/s",
        LLAMA,
        "tokens",
        LLAMA_PER_S,
        16384,
        2**21,
    ),
)
GRADIENTS = {"float32": 1.0, "16-bit": 0.5}


def step_of(work: Workload, units: float, gradients: str) -> TrainingStep:
    return TrainingStep(
        units / work.per_s,
        GRADIENTS[gradients] * work.preflight.gradient_bytes,
        bucket_bytes=work.bucket_bytes,
        small_last=work.small_last,
    )


def table(head: tuple[str, ...], rows: list[list[str]], num_texts: int) -> str:
    lines = [list(head), ["---"] * num_texts + ["---:"] * (len(head) - num_texts), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def against_published() -> str:
    rows = []
    for found in PUBLISHED:
        # Few devices may reduce already: their step is slower than that of one by itself.
        few, many = (scale_step(found.step, found.cluster, n) for n in (found.few, found.many))
        predicted = few.step_s / many.step_s
        rows.append([
            found.what, f"{found.few}", f"{found.many}", f"{found.efficiency:.1%}",
            f"{predicted:.1%}", f"{100 * (predicted - found.efficiency):+.1f}",
            f"{many.reduction_s / found.step.compute_s:.1%}",
        ])  # fmt: skip
    head = ("what", "from GPUs", "to GPUs", "published", "predicted", "points off",
            "reducing / step")  # fmt: skip
    return table(head, rows, 1)


def all_reduces() -> str:
    rows = [
        [f"{num}", f"{size / 2**20:,.0f} MiB"]
        + [f"{way(size, H100, num) * 1e3:.2f}" for way in ALGORITHMS.values()]
        for num in NUM_DEVICES for size in (25 * 2**20, 1000 * 2**20)
    ]  # fmt: skip
    return table(("H100s", "bytes", *(f"{way}, ms" for way in ALGORITHMS)), rows, 0)


def _cells(work: Workload, gradients: str, units_at: dict[int, float]) -> Iterator[str]:
    """Efficiency at each number of devices and network; marked where reducing bounds the step."""
    for num, units in units_at.items():
        for cluster in list(NETWORKS.values())[: 1 if num <= H100.devices_per_node else None]:
            found = scale_step(step_of(work, units, gradients), cluster, num)
            yield f"{found.efficiency:.1%}" + (" *" if found.bound_by_reduction else "")


def _head(first: tuple[str, ...]) -> tuple[str, ...]:
    return (*first, f"{NUM_DEVICES[0]}",
            *(f"{num:,}, {name}" for num in NUM_DEVICES[1:] for name in NETWORKS))  # fmt: skip


def same_work_a_device() -> str:
    rows = [
        [work.name, f"{work.units:,} {work.unit}", gradients,
         *_cells(work, gradients, dict.fromkeys(NUM_DEVICES, work.units))]
        for work in WORKLOADS for gradients in GRADIENTS
    ]  # fmt: skip
    return table(_head(("model", "a GPU", "gradients")), rows, 3)


def same_work_together() -> str:
    rows = [
        [work.name, f"{work.global_units:,} {work.unit}", gradients,
         *_cells(work, gradients, {n: work.global_units / n for n in NUM_DEVICES})]
        for work in WORKLOADS for gradients in GRADIENTS
    ]  # fmt: skip
    return table(_head(("model", "together", "gradients")), rows, 3)


def where_it_binds() -> str:
    """The least work a device and step whose backward pass hides the reduction."""
    rows = []
    for work in WORKLOADS:
        for gradients in GRADIENTS:
            row = [work.name, work.unit, gradients]
            for num in NUM_DEVICES:
                for cluster in list(NETWORKS.values())[: 1 if num == NUM_DEVICES[0] else None]:
                    least_s = least_compute_s(step_of(work, 1, gradients), cluster, num)
                    row.append(f"{least_s * work.per_s:,.0f}")
            rows.append(row)
    return table(_head(("model", "unit", "gradients")), rows, 3)


def from_how_many() -> str:
    """The least power of two from which reducing takes longer than the backward pass."""
    rows = []
    for work in WORKLOADS:
        for gradients in GRADIENTS:
            row = [work.name, gradients]
            for is_together in (False, True):
                row += [_first_bound(work, gradients, at, is_together) for at in NETWORKS.values()]
            rows.append(row)
    kinds = ("same a GPU", "same together")
    head = ("model", "gradients", *(f"{kind}, {name}" for kind in kinds for name in NETWORKS))
    return table(head, rows, 2)


def _first_bound(work: Workload, gradients: str, cluster: Cluster, is_together: bool) -> str:
    for num in (2**power for power in range(1, 13)):
        step = step_of(work, work.global_units / num if is_together else work.units, gradients)
        if scale_step(step, cluster, num).bound_by_reduction:
            return f"{num:,}"
    return "over 4,096"


def replicated_each_step() -> str:
    """torch.nn.DataParallel beside DistributedDataParallel, on eight GPUs of one node."""
    rows = []
    for work in WORKLOADS:
        step, num = step_of(work, work.units, "float32"), H100.devices_per_node
        step = dataclasses.replace(step, gradient_bytes=4 * work.preflight.num_parameters)
        least_s = replicated_step_s(step, H100.within)
        rows.append([
            work.name, f"{work.units:,} {work.unit}", f"{step.gradient_bytes / 1e9:.2f}",
            f"{step.compute_s / least_s:.1%}", f"{scale_step(step, H100, num).efficiency:.1%}",
        ])  # fmt: skip
    head = ("model", "a GPU", "GB of parameters", "DataParallel, at most",
            "DistributedDataParallel")  # fmt: skip
    return table(head, rows, 2)


TABLES = {
    "An all-reduce on H100s, 400 Gb/s a GPU": all_reduces,
    "Against published figures": against_published,
    "Efficiency with the same work a GPU": same_work_a_device,
    "Efficiency with the same work together": same_work_together,
    "The least work a GPU that hides the reduction": where_it_binds,
    "GPUs from which reducing bounds the step": from_how_many,
    "torch.nn.DataParallel on eight GPUs of one node": replicated_each_step,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, nargs="+", metavar="RESULT")
    results = parser.parse_args().keep
    if results:
        keep(results)
        return
    for title, make in TABLES.items():
        print(f"{title}:\n\n{make()}\n")


if __name__ == "__main__":
    main()
