"""Pure functions that summarise a compiled program for the report."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from accbench.pjrt.gpu import GpuSpec
from accbench.preflight import kernels
from accbench.preflight.kernels import Kernel

# The report lists results of this many elements or more by element type.
LARGE_ELEMENTS = 1_000_000
# A launch that moves fewer bytes is dominated by its launch time.
SMALL_BYTES = 1_000_000
# Overhead of a launch in seconds: the order of magnitude that CUDA's documentation and users of
# Nsight report between two dependent small kernels. The bound does not include it.
LAUNCH_S = 2e-6
_NUM_LONGEST = 20


def bound_s(kernel: Kernel, gpu: GpuSpec) -> float:
    """Return the least time of a kernel: its bytes at full bandwidth, or its flops at peak rate."""
    if kernel.kind in kernels.BETWEEN_GPUS:
        return 0.0  # runs concurrently, over links that GpuSpec does not describe
    return kernel.repeats * max(
        kernel.num_bytes / gpu.bytes_per_s, kernel.flops / gpu.flops_per_s(kernel.factors)
    )


def summarize_kernels(
    program_kernels: Sequence[Kernel], gpu: GpuSpec, num_samples: int, thunks: dict[str, int],
    parameter_sizes: Sequence[int] = (),
) -> dict[str, Any]:  # fmt: skip
    """Summarise what runs, what it moves and what bounds it.

    Args:
        program_kernels: in the order in which they run.
        gpu: the GPU that runs them.
        num_samples: samples per GPU and step.
        thunks: kind -> launches, from the compiler's list of launches.
        parameter_sizes: number of elements of each parameter.
    """
    active = [kernel for kernel in program_kernels if kernel.kind != kernels.DONE]
    by_kind: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in active:
        by_kind[kernel.kind].append(kernel)
    kinds = [{"kind": kind, **_sums(group, gpu)} for kind, group in by_kind.items()]
    total = _sums(active, gpu)
    num_launches = sum(thunks.values()) if thunks else total["launches"]
    longest = sorted(active, key=lambda kernel: -bound_s(kernel, gpu))[:_NUM_LONGEST]
    return {
        "step": {
            **total,
            "launches": num_launches,
            "small_launches": sum(kernel.num_bytes < SMALL_BYTES for kernel in active),
            "launch_s": num_launches * LAUNCH_S,
            "samples": num_samples,
            "samples_per_s_at_most": num_samples / total["bound_s"] if total["bound_s"] else None,
        },
        "kinds": sorted(kinds, key=lambda kind: -kind["bound_s"]),
        "thunks": thunks,
        "host_transfers": [kernel.name for kernel in active if kernel.to_host],
        "layouts": _counts(kernel.layout for kernel in active if kernel.layout),
        "large_tensors": _large_tensors(active, set(parameter_sizes)),
        "dearest": [_row(kernel, gpu) for kernel in longest],
        "kernels": [
            [kernel.kind, kernel.num_bytes * kernel.repeats, kernel.flops * kernel.repeats,
             bound_s(kernel, gpu)]
            for kernel in active
        ],
    }  # fmt: skip


def _sums(group: Sequence[Kernel], gpu: GpuSpec) -> dict[str, Any]:
    return {
        "launches": sum(kernel.repeats for kernel in group),
        "bytes": sum(kernel.num_bytes * kernel.repeats for kernel in group),
        "flops": sum(kernel.flops * kernel.repeats for kernel in group),
        "bound_s": sum(bound_s(kernel, gpu) for kernel in group),
    }


def _row(kernel: Kernel, gpu: GpuSpec) -> dict[str, Any]:
    return {
        "name": kernel.name,
        "kind": kernel.kind,
        "bytes": kernel.num_bytes * kernel.repeats,
        "flops": kernel.flops * kernel.repeats,
        "bound_s": bound_s(kernel, gpu),
        "results": [str(shape) for shape in kernel.results],
        "source": kernel.source,
    }


def _counts(names: Any) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for name in names:
        counts[name] += 1
    return dict(counts)


def _large_tensors(active: Sequence[Kernel], parameter_sizes: set[int]) -> list[dict[str, Any]]:
    """Return a row per element type of large results: count, bytes, the largest and its source.

    Results of a parameter's size are left out: weights, moments and averages are float32 by intent.
    """
    by_type: dict[str, list[tuple[int, str, str]]] = defaultdict(list)
    for kernel in active:
        for shape in kernel.results:
            large = shape.num_elements >= LARGE_ELEMENTS
            if large and shape.num_elements not in parameter_sizes:
                entry = (shape.num_bytes, str(shape), kernel.source)
                by_type[shape.element_type].append(entry)
    rows = []
    for element_type, entries in by_type.items():
        _, shape_text, source = max(entries)
        rows.append(
            {
                "element_type": element_type,
                "count": len(entries),
                "bytes": sum(size for size, _, _ in entries),
                "largest": shape_text,
                "source": source,
            }
        )
    return sorted(rows, key=lambda row: -row["bytes"])


def summarize_reduction(program_kernels: Sequence[Kernel], gpu: GpuSpec) -> dict[str, Any] | None:
    """Summarise how much of the collectives can overlap with the backward pass.

    Lists all but all-gathers, which are counted: reductions of gradients, and with `--tp` and
    `--cp` those of activations and exchanges of heads.

    Returns:
        None if there is none but all-gathers.
    """
    starts = [
        (index, kernel)
        for index, kernel in enumerate(program_kernels)
        if kernel.kind == kernels.COLLECTIVE
    ]
    if not starts:
        return None
    last_product = max(
        (i for i, kernel in enumerate(program_kernels) if kernel.is_product), default=-1
    )
    reduces: list[dict[str, Any]] = []
    for index, kernel in starts:
        end = next(
            (i for i, other in enumerate(program_kernels)
             if i > index and other.kind == kernels.DONE and kernel.name in other.waits_for),
            index,
        )  # fmt: skip
        overlapping = [
            other for other in program_kernels[index:end] if other.kind not in kernels.BETWEEN_GPUS
        ]
        num_products = sum(other.is_product for other in overlapping)
        reduces.append(
            {
                "name": kernel.name,
                "kind": kernel.opcode,
                "bytes": kernel.num_bytes,
                # A reduction that is awaited at once overlaps with nothing, however early it is.
                "before_last_product": index < last_product and num_products > 0,
                "products_beside": num_products,
                "beside_s": sum(bound_s(other, gpu) for other in overlapping),
            }
        )
    gathers = [kernel for kernel in program_kernels if kernel.kind == kernels.GATHER]
    total = sum(row["bytes"] for row in reduces)
    early = sum(row["bytes"] for row in reduces if row["before_last_product"])
    return {
        "all_reduces": reduces,
        "all_gathers": len(gathers),
        "gathered_bytes": sum(kernel.num_bytes for kernel in gathers),
        "bytes": total,
        "started_before_last_product": early / total if total else 0.0,
    }


def thunk_counts(text: str) -> dict[str, int]:
    """Count launches by kind in the compiler's `thunk_sequence.txt`.

    Each line begins with a kind, before which newer versions of XLA write a number.
    """
    counts: dict[str, int] = defaultdict(int)
    for line in text.splitlines():
        kind = next((word for word in line.split()[:2] if not word.rstrip(":").isdigit()), "")
        if kind.startswith("k") and kind not in _NO_LAUNCH:
            counts[kind.rstrip(",")] += 1
    return dict(counts)


# Thunks that group other thunks, or only wait.
_NO_LAUNCH = {
    "kCommandBuffer", "kSequential", "kWhile", "kConditional", "kWaitForStreams",
    "kNcclAllReduceDone", "kAllReduceDone", "kCopyDone", "kAsyncStart", "kAsyncDone",
}  # fmt: skip


def memory(stats: dict[str, int], gpu: GpuSpec, program: str) -> dict[str, Any]:
    """Summarise whether the step fits the GPU's memory.

    Args:
        stats: `pjrt_c_api.Memory` as a dict.
        gpu: the GPU.
        program: the optimised program's text.
    """
    peak = stats["arguments"] + stats["results"] - stats["aliased"] + stats["temporaries"]
    return {
        **{f"{key}_bytes": value for key, value in stats.items()},
        "peak_bytes": peak,
        "gpu_bytes": gpu.memory_bytes,
        "fits": peak <= gpu.memory_bytes,
        "rematerialised": sum(".remat" in line.split("=")[0] for line in program.splitlines()),
    }
