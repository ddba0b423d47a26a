"""Flags of engine xla, `--xla.NAME`."""

import dataclasses
from typing import Literal

from accbench import engines
from accbench.config.field import flag


@dataclasses.dataclass(frozen=True)
class XlaOptions(engines.Engine.Options):
    """Options of the engine xla."""

    compile_cache: Literal["auto", "on", "off"] = flag(
        "auto",
        "Keep compiled graphs on disk. auto: on if the platform can load what it saved.",
    )
    cache_dir: str | None = flag(
        None,
        "The cache's folder. Unset: accbench/xla in the user's cache folder.",
        is_path=True,
    )
    bucket_mib: int = flag(
        20,
        "Size in MiB of the buckets for gradients averaged in the graph: each bucket starts as "
        "soon as the backward pass has its gradients.",
        minimum=1,
    )
    host_bucket_mib: int = flag(
        64,
        "Size in MiB of the buckets for gradients averaged on the host.",
        minimum=1,
    )
    replay: Literal["auto", "on", "off"] = flag(
        "auto",
        "Run recorded steps without tracing them again. auto: on where that is proven to give "
        "the same numbers, which is one worker on a CPU.",
    )
    lean: Literal["auto", "on", "off"] = flag(
        "auto",
        "Compute BatchNorm, ReLU, max-pooling and AdamW in a form that moves fewer bytes on a "
        "GPU. auto: off on a CPU, where that is slower.",
    )
    flags: str = flag(
        "",
        "More XLA flags, `name=value` separated by blanks; those in XLA_FLAGS win.",
    )
