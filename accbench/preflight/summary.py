"""From a compiled program to what there is to say of it: pure functions."""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from accbench.preflight import kernels
from accbench.preflight.gpu import Gpu
from accbench.preflight.kernels import Kernel

# Tensors from this size on are named by their element type.
LARGE_ELEMENTS = 1_000_000
# A launch that moves less than this is bound by its own start.
SMALL_BYTES = 1_000_000
# What each launch takes beside its work, in seconds: the order of what CUDA's documentation and
# Nsight's users see between two dependent small kernels. It is not in the bound.
LAUNCH_S = 2e-6
_NUM_DEAREST = 20


def bound_s(kernel: Kernel, gpu: Gpu) -> float:
    """The least time: its bytes at full bandwidth, or its products at full rate."""
    if kernel.kind in kernels.BETWEEN_GPUS:
        return 0.0  # beside the others, over links that are not described
    return kernel.repeats * max(
        kernel.num_bytes / gpu.bytes_per_s, kernel.flops / gpu.flops_per_s(kernel.factors)
    )


def of_kernels(
    found: Sequence[Kernel], gpu: Gpu, num_samples: int, thunks: dict[str, int],
    parameter_sizes: Sequence[int] = (),
) -> dict[str, Any]:  # fmt: skip
    """What runs, what it moves and what bounds it.

    Args:
        found: in the order in which they run.
        num_samples: of one GPU and step.
        thunks: kind -> launches, as the compiler lists what it starts.
        parameter_sizes: elements of each parameter.
    """
    at_work = [kernel for kernel in found if kernel.kind != kernels.DONE]
    by_kind: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in at_work:
        by_kind[kernel.kind].append(kernel)
    kinds = [{"kind": kind, **_sums(group, gpu)} for kind, group in by_kind.items()]
    whole = _sums(at_work, gpu)
    num_launches = sum(thunks.values()) if thunks else whole["launches"]
    dearest = sorted(at_work, key=lambda kernel: -bound_s(kernel, gpu))[:_NUM_DEAREST]
    return {
        "step": {
            **whole,
            "launches": num_launches,
            "small_launches": sum(kernel.num_bytes < SMALL_BYTES for kernel in at_work),
            "launch_s": num_launches * LAUNCH_S,
            "samples": num_samples,
            "samples_per_s_at_most": num_samples / whole["bound_s"] if whole["bound_s"] else None,
        },
        "kinds": sorted(kinds, key=lambda kind: -kind["bound_s"]),
        "thunks": thunks,
        "host_transfers": [kernel.name for kernel in at_work if kernel.to_host],
        "layouts": _counts(kernel.layout for kernel in at_work if kernel.layout),
        "large_tensors": _large_tensors(at_work, set(parameter_sizes)),
        "dearest": [_row(kernel, gpu) for kernel in dearest],
        "kernels": [
            [kernel.kind, kernel.num_bytes * kernel.repeats, kernel.flops * kernel.repeats,
             bound_s(kernel, gpu)]
            for kernel in at_work
        ],
    }  # fmt: skip


def _sums(group: Sequence[Kernel], gpu: Gpu) -> dict[str, Any]:
    return {
        "launches": sum(kernel.repeats for kernel in group),
        "bytes": sum(kernel.num_bytes * kernel.repeats for kernel in group),
        "flops": sum(kernel.flops * kernel.repeats for kernel in group),
        "bound_s": sum(bound_s(kernel, gpu) for kernel in group),
    }


def _row(kernel: Kernel, gpu: Gpu) -> dict[str, Any]:
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
    found: dict[str, int] = defaultdict(int)
    for name in names:
        found[name] += 1
    return dict(found)


def _large_tensors(found: Sequence[Kernel], parameter_sizes: set[int]) -> list[dict[str, Any]]:
    """Element type -> how many large results there are, and the largest with its source.

    Those of a parameter's size are left out: weights, moments and averages are float32 by intent.
    """
    by_type: dict[str, list[tuple[int, str, str]]] = defaultdict(list)
    for kernel in found:
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


def of_reduction(found: Sequence[Kernel], gpu: Gpu) -> dict[str, Any] | None:
    """All-reduces and reduce-scatters: how much of them can run beside the backward pass.

    And all-gathers, of parameters in parts. None without any reduction.
    """
    starts = [
        (index, kernel) for index, kernel in enumerate(found) if kernel.kind == kernels.COLLECTIVE
    ]
    if not starts:
        return None
    last = max((i for i, kernel in enumerate(found) if kernel.is_product), default=-1)
    reduces: list[dict[str, Any]] = []
    for index, kernel in starts:
        end = next(
            (i for i, other in enumerate(found)
             if i > index and other.kind == kernels.DONE and kernel.name in other.waits_for),
            index,
        )  # fmt: skip
        beside = [other for other in found[index:end] if other.kind not in kernels.BETWEEN_GPUS]
        products_beside = sum(other.is_product for other in beside)
        reduces.append(
            {
                "name": kernel.name,
                "bytes": kernel.num_bytes,
                # One that is waited for at once is early for nothing.
                "before_last_product": index < last and products_beside > 0,
                "products_beside": products_beside,
                "beside_s": sum(bound_s(other, gpu) for other in beside),
            }
        )
    gathers = [kernel for kernel in found if kernel.kind == kernels.GATHER]
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
    """Kind -> launches, from the list of what the program starts (`thunk_sequence.txt`)."""
    found: dict[str, int] = defaultdict(int)
    for line in text.splitlines():
        kind = line.split()[0] if line.split() else ""
        if kind.startswith("k") and kind not in _NO_LAUNCH:
            found[kind.rstrip(",")] += 1
    return dict(found)


# Groups of launches, and what only waits.
_NO_LAUNCH = {
    "kCommandBuffer", "kSequential", "kWhile", "kConditional", "kWaitForStreams",
    "kNcclAllReduceDone", "kAllReduceDone", "kCopyDone",
}  # fmt: skip


def memory(stats: dict[str, int], gpu: Gpu, program: str) -> dict[str, Any]:
    """Whether it fits: `stats` is `pjrt_c_api.Memory` as a dict, `program` the optimised text."""
    peak = stats["arguments"] + stats["results"] - stats["aliased"] + stats["temporaries"]
    return {
        **{f"{key}_bytes": value for key, value in stats.items()},
        "peak_bytes": peak,
        "gpu_bytes": gpu.memory_bytes,
        "fits": peak <= gpu.memory_bytes,
        "rematerialised": sum(".remat" in line.split("=")[0] for line in program.splitlines()),
    }


def of_gpu(gpu: Gpu) -> dict[str, Any]:
    """The GPU, as a report has it."""
    return dataclasses.asdict(gpu)
