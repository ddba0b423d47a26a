"""The choice of the processor's vector instructions, tried out once a compile cache.

Inductor tries each kind in two fresh Pythons, and older versions do so in every process: 3 to 5
seconds of each start, with two workers on two cores.
"""

import contextlib
from pathlib import Path
from typing import Any

import torch

from accbench.engines.common import compile_cache_key


def pick() -> None:
    """Let inductor choose; a kind that was loaded before with the same compiler is not tried."""
    from torch._inductor import cpu_vec_isa

    isa: Any = cpu_vec_isa.VecISA
    if hasattr(isa, "_probe_load"):  # this torch remembers by itself
        cpu_vec_isa.pick_vec_isa()
        return
    check = isa.check_build

    def check_once(self: Any, code: str) -> bool:
        marker = _marker(self, code)
        if marker.exists():
            return True
        works = bool(check(self, code))
        if works:
            with contextlib.suppress(OSError):  # a full disk: the next start tries again
                marker.touch()
        return works

    isa.check_build = check_once
    try:
        cpu_vec_isa.pick_vec_isa()
    finally:
        isa.check_build = check


def _marker(isa: Any, code: str) -> Path:
    """Return the file that says that the processor ran the code; torch's key and ours name it."""
    from torch._inductor import codecache, cpu_vec_isa

    # With the versions of torch and of the compiler, and the compiler's flags.
    fingerprint = cpu_vec_isa._get_isa_dry_compile_fingerprint(isa._arch_flags)
    _, source = codecache.write(code, "cpp", extra=fingerprint)
    processor = compile_cache_key.processor_fingerprint()
    return Path(source).with_suffix(f".{processor}.{torch.__version__}.load_ok")
