"""XLA's flags for training on NVIDIA GPUs; a user's own flags win over them."""

import dataclasses
import os
import re

from accbench.errors import RequestError


@dataclasses.dataclass(frozen=True)
class XlaFlag:
    """One flag of XLA_FLAGS, its value, and the reason for it."""

    name: str
    value: str
    reason: str


# The parsers of XLA_FLAGS, torch_xla's, JAX's and the plugin's, end the process on a name they
# do not know, so every one here is known to all of the pinned versions.
GPU_FLAGS = (
    XlaFlag(
        "xla_gpu_enable_latency_hiding_scheduler", "true",
        "orders the step so that the all-reduce runs beside computation, not after it",
    ),
    XlaFlag(
        "xla_gpu_experimental_parallel_collective_overlap_limit", "64",
        "lets the scheduler have several all-reduces under way; with one alone a bucket waits "
        "for the one before and starts late",
    ),
    XlaFlag(
        "xla_gpu_all_reduce_combine_threshold_bytes", str(2**20),
        "keeps the buckets that gradients come in (--xla.bucket_mib) apart: together they would "
        "start when the backward pass is over",
    ),
    XlaFlag(
        "xla_gpu_reduce_scatter_combine_threshold_bytes", str(2**20),
        "keeps the reductions of sharded parameters (--dp_shard) apart for the same reason",
    ),
    XlaFlag(
        "xla_gpu_autotune_level", "4",
        "times convolution and matrix algorithms on initialised buffers and checks their "
        "results; costs compile time once, and the compile cache keeps it",
    ),
    XlaFlag(
        "xla_gpu_graph_min_graph_size", "2",
        "command buffers (CUDA graphs) for runs of 2 kernels and more instead of 5: "
        "convolutions cut a ResNet's step into short runs",
    ),
    XlaFlag(
        "xla_gpu_force_compilation_parallelism", "8",
        "threads that compile one step's kernels; torch_xla's own default, named so that "
        "it can be seen and changed",
    ),
)  # fmt: skip


def parse(text: str) -> dict[str, str]:
    """Parse `--a=1 b=2` into name -> value; a name without a value is true.

    Raises:
        RequestError: a word is not a flag.
    """
    flags = {}
    for word in text.split():
        match = re.fullmatch(r"(?:--)?(xla_\w+)(?:=(\S*))?", word)
        if match is None:
            raise RequestError(
                f"{word!r} is not an XLA flag; write xla_name=value, separated by blanks"
            )
        flags[match[1]] = "true" if match[2] is None else match[2]
    return flags


def merge(device: str, option_flags: str) -> str:
    """Return XLA_FLAGS for a process.

    Flags of the environment win over `option_flags`, and those over the table.
    """
    table = {flag.name: flag.value for flag in GPU_FLAGS} if device == "cuda" else {}
    chosen = {**table, **parse(option_flags)}
    in_environment = os.environ.get("XLA_FLAGS", "").split()
    names = {word.removeprefix("--").split("=")[0] for word in in_environment}
    added = [f"--{name}={value}" for name, value in chosen.items() if name not in names]
    return " ".join([*in_environment, *added])
