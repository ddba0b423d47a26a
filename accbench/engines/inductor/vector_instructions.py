"""The choice of the processor's vector instructions, tried out once a compile cache.

Inductor compiles code for each kind and loads it in a fresh Python, and older versions do the
latter in every process: 3 to 5 seconds of each start, with two workers on two cores.
"""

import contextlib
from pathlib import Path
from typing import Any, cast

import torch

from accbench.engines.common import compile_cache_key
from accbench.engines.inductor import compile_cache_files, full_disk


def pick() -> None:
    """Let inductor choose; a kind that was loaded before with the same compiler is not tried.

    Raises:
        OSError, CppCompileError: the disk is full. Inductor would take a kind that it could not try
            for one that the processor does not have.
    """
    from torch._inductor import cpp_builder, cpu_vec_isa

    isa, builder = cast(Any, cpu_vec_isa.VecISA), cast(Any, cpp_builder.CppBuilder)
    check, build = isa.check_build, builder.build
    remembers = hasattr(isa, "_probe_load")  # this torch has markers of its own
    errors: list[Exception] = []
    working: list[Any] = []

    def check_once(self: Any, code: str) -> bool:
        # Inductor goes from the widest kind down, and takes the first. A processor and a compiler
        # that have AVX-512 have AVX2.
        if working and isinstance(self, (cpu_vec_isa.VecAVX512, cpu_vec_isa.VecAVX2)):
            return True
        works = try_once(self, code)
        if works:
            working.append(self)
        return works

    def try_once(self: Any, code: str) -> bool:
        source = _source(self, code)
        library = source.with_suffix(".so")
        compile_cache_files.remove_if_cut_off(library, compile_cache_files.torch_lock(library))
        if remembers:
            return bool(check(self, code))
        marker = _marker(source)
        if marker.exists():  # also in a cache that cannot be written
            return True
        with compile_cache_files.locked(source.with_suffix(".try.lock")):
            if marker.exists():  # by now, if another worker held the lock
                return True
            works = bool(check(self, code))
            if works:
                with contextlib.suppress(OSError):  # a full disk: the next start tries again
                    marker.touch()
        return works

    def build_or_note(self: Any) -> None:
        try:
            build(self)
        except Exception as error:
            errors.append(error)
            raise

    isa.check_build, builder.build = check_once, build_or_note
    try:
        with compile_cache_files.checked():
            cpu_vec_isa.pick_vec_isa()
    finally:
        isa.check_build, builder.build = check, build
    for error in errors:
        if full_disk.is_cause(error):
            raise error


def _source(isa: Any, code: str) -> Path:
    """Return the file of the code that torch tries; torch's key names it."""
    from torch._inductor import codecache, cpu_vec_isa

    # With the versions of torch and of the compiler, and the compiler's flags.
    fingerprint = cpu_vec_isa._get_isa_dry_compile_fingerprint(isa.build_arch_flags())
    return Path(codecache.write(code, "cpp", extra=fingerprint)[1])


def _marker(source: Path) -> Path:
    """Return the file that says that the processor ran the code; torch's key and ours name it."""
    processor = compile_cache_key.processor_fingerprint()
    return source.with_suffix(f".{processor}.{torch.__version__}.load_ok")
