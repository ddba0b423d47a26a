"""XLA's flags for training on NVIDIA GPUs; a user's own flags win over them."""

import dataclasses
import mmap
import os
import re
from collections.abc import Container, Iterable
from functools import cache
from pathlib import Path

from accbench.errors import RequestError
from accbench.system import cgroups


@dataclasses.dataclass(frozen=True)
class XlaFlag:
    """One flag of XLA_FLAGS, its value, and the reason for it."""

    name: str
    value: str
    reason: str


_PARALLELISM = "xla_gpu_force_compilation_parallelism"
# The parsers of XLA_FLAGS, torch_xla's, JAX's and the plugin's, end the process on a name they
# do not know: `unknown_to` finds what to leave out.
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
        _PARALLELISM, "",  # `merge` fills it in
        "threads that compile one step's kernels: this worker's share of the cores",
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


def merge(device: str, option_flags: str, unknown: Container[str] = ()) -> str:
    """Return XLA_FLAGS for a process.

    Flags of the environment win over `option_flags`, and those over the table.

    Args:
        device: "cpu", "cuda" or "tpu"; the table is for CUDA.
        option_flags: of the user's.
        unknown: names that are left out of the table, see `unknown_to`.
    """
    table = {flag.name: flag.value for flag in GPU_FLAGS} if device == "cuda" else {}
    if table:
        workers = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        table[_PARALLELISM] = str(max(1, cgroups.num_cores() // workers))
    table = {name: value for name, value in table.items() if name not in unknown}
    chosen = {**table, **parse(option_flags)}
    in_environment = os.environ.get("XLA_FLAGS", "").split()
    names = {word.removeprefix("--").split("=")[0] for word in in_environment}
    added = [f"--{name}={value}" for name, value in chosen.items() if name not in names]
    return " ".join([*in_environment, *added])


def unknown_in_table(library: Path | None) -> tuple[str, ...]:
    """Return the names of the table that a plugin does not know; none without a plugin."""
    return () if library is None else unknown_to(library, tuple(flag.name for flag in GPU_FLAGS))


@cache
def unknown_to(library: Path, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of the flags' names that a plugin's parser of XLA_FLAGS does not know.

    The library holds each name that it parses as text that ends in a zero byte. A name that was
    given up is still in there, as a reserved one of a protocol buffer, but without the zero byte.

    Args:
        library: the plugin.
        names: flags without dashes, as a tuple.
    """
    try:
        with (
            library.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            return tuple(name for name in names if content.find(name.encode() + b"\0") < 0)
    except (OSError, ValueError):  # not to be read, or empty: the plugin will say so itself
        return ()


def left_out_notice(unknown: Iterable[str]) -> str:
    """Return a line that names the flags that were left out."""
    return f"XLA flags that this plugin does not know are left out: {', '.join(unknown)}"
