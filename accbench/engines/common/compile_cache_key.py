"""What decides a graph's compiled code beside torch's own cache keys.

The keys of AOTAutograd and of inductor hold the graph that dynamo captured, inductor's settings and
torch's version. The other influences on the code are here: without them a run could load another
run's code, and train on it without a word.
"""

import contextlib
import hashlib
import inspect
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

# Fields of /proc/cpuinfo that decide the code that compilers generate (Linux, x86 and Arm).
_CPU_FIELDS = (
    "vendor_id", "cpu family", "model", "model name", "flags", "CPU implementer",
    "CPU architecture", "CPU variant", "CPU part", "Features",
)  # fmt: skip


def tag(device_type: str, *facts: Any) -> str:
    """Return all that a graph's code depends on now, beyond what torch's own keys hold.

    Args:
        device_type: whose autocast settings count.
        facts: more values of the engine, in a form whose `repr` is complete.
    """
    settings = _autocast_settings(device_type), _codegen_settings()
    return f"accbench {(*settings, _patch_digest(), processor_fingerprint(), facts)}"


def tagged(tag: str) -> contextlib.AbstractContextManager[Any]:
    """Add a tag to the keys of torch's compile caches in the block."""
    settings: Any = torch.compiler.config
    patch: contextlib.AbstractContextManager[Any] = settings.patch(
        cache_key_tag=f"{settings.cache_key_tag} {tag}".strip()
    )
    return patch


def _autocast_settings(device_type: str) -> tuple[Any, ...]:
    """Return autocast's settings; AOTAutograd's key has whether it is on, and not its dtype."""
    return (
        torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type),
        torch.is_autocast_cache_enabled(),
    )  # fmt: skip


def _codegen_settings() -> tuple[Any, ...]:
    """Return settings of torch that a graph does not show, and that its code depends on."""
    kernels = torch.backends.cuda
    return (
        # The dtype and device of constants and new tensors.
        torch.get_default_dtype(), str(torch.get_default_device()),
        # Which kernels attention is decomposed into.
        kernels.flash_sdp_enabled(), kernels.mem_efficient_sdp_enabled(),
        kernels.math_sdp_enabled(), kernels.cudnn_sdp_enabled(),
        # Loops on a CPU are generated for a number of threads.
        torch.get_num_threads(), torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled,
        torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32,
    )  # fmt: skip


@cache
def _patch_digest() -> str:
    """Return a digest of the sources that change torch's compilers."""
    from accbench.engines.common import decompositions
    from accbench.engines.inductor import patches

    texts = [inspect.getsource(module) for module in (decompositions, patches)]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


@cache
def processor_fingerprint() -> str:
    """Return a short fingerprint of this machine's processor and its instruction sets.

    Without it a folder on a shared disk would give one machine the instructions of another.
    """
    facts = [platform.machine(), *sorted(_cpu_lines(Path("/proc/cpuinfo").read_text))]
    if len(facts) == 1:
        facts.append(platform.processor())
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def _cpu_lines(read: Callable[[], str]) -> set[str]:
    with contextlib.suppress(OSError):
        lines = (line.partition(":") for line in read().splitlines())
        return {f"{k.strip()}:{v.strip()}" for k, _, v in lines if k.strip() in _CPU_FIELDS}
    return set()
