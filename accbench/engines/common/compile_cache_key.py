"""What torch's compile caches and our folders of compiled code must tell apart, and do not.

The keys of AOTAutograd and of inductor hold the graph that dynamo found, inductor's settings and
torch's version. What else decides what becomes of that graph is here: a run that differs in it
would be given another run's code, and train on it without a word.
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

# Of a processor, what the code that compilers make for it follows from (Linux, x86 and Arm).
_OF_PROCESSOR = (
    "vendor_id", "cpu family", "model", "model name", "flags", "CPU implementer",
    "CPU architecture", "CPU variant", "CPU part", "Features",
)  # fmt: skip


def tag(device_type: str, *facts: Any) -> str:
    """Return what a graph's code depends on now, beyond what torch's own keys hold.

    Args:
        device_type: whose autocast counts.
        facts: of the engine, in a form whose `repr` says all.
    """
    return f"accbench {(_casts(device_type), _settings(), _rules(), processor(), facts)}"


def tagged(of: str) -> contextlib.AbstractContextManager[Any]:
    """Have torch's compile caches tell what is compiled in here apart by a `tag`."""
    settings: Any = torch.compiler.config
    patch: contextlib.AbstractContextManager[Any] = settings.patch(
        cache_key_tag=f"{settings.cache_key_tag} {of}".strip()
    )
    return patch


def _casts(device_type: str) -> tuple[Any, ...]:
    """AOTAutograd's key knows whether autocast is on, and not its type."""
    return (
        torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type),
        torch.is_autocast_cache_enabled(),
    )  # fmt: skip


def _settings() -> tuple[Any, ...]:
    """Settings of torch's that a graph does not show, and that its code follows from."""
    kernels = torch.backends.cuda
    return (
        # Constants and new tensors are of these.
        torch.get_default_dtype(), str(torch.get_default_device()),
        # What attention is taken apart into.
        kernels.flash_sdp_enabled(), kernels.mem_efficient_sdp_enabled(),
        kernels.math_sdp_enabled(), kernels.cudnn_sdp_enabled(),
        # Loops on a CPU are generated for a number of threads.
        torch.get_num_threads(), torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled,
        torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32,
    )  # fmt: skip


@cache
def _rules() -> str:
    """Return a digest of what accbench changes of torch's compilers."""
    from accbench.engines.common import decompositions
    from accbench.engines.inductor import patches

    texts = [inspect.getsource(module) for module in (decompositions, patches)]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


@cache
def processor() -> str:
    """Return a short name of this machine's processor by what it can do.

    A folder on a disk that machines share would else give one the instructions of another.
    """
    facts = [platform.machine(), *sorted(_lines_of_processor(Path("/proc/cpuinfo").read_text))]
    if len(facts) == 1:
        facts.append(platform.processor())
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def _lines_of_processor(read: Callable[[], str]) -> set[str]:
    with contextlib.suppress(OSError):
        lines = (line.partition(":") for line in read().splitlines())
        return {f"{k.strip()}:{v.strip()}" for k, _, v in lines if k.strip() in _OF_PROCESSOR}
    return set()
