"""The engine's options as JAX and the lowering of graphs take them."""

import os
from functools import cache
from pathlib import Path
from typing import Any

from accbench.engines.common import compile_cache_key
from accbench.errors import RequestError
from accbench.pjrt import xla_flags
from accbench.system import cache_folders

PLATFORMS = {"cpu": "cpu", "cuda": "cuda,cpu", "tpu": "tpu,cpu"}
"""JAX's platforms of a device of ours: its own, and the host's, by which arrays come and go."""


def configure(device: str, flags: str) -> None:
    """Platforms, XLA's flags and the width of numbers; what the environment says of them counts.

    Called before JAX is first used in the process.

    Args:
        flags: a person's own of XLA's.
    """
    merged = xla_flags.merge(device, flags)
    if merged:  # XLA reads them once, when a device is first used
        os.environ["XLA_FLAGS"] = merged
    import jax

    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", PLATFORMS[device])
    if "JAX_ENABLE_X64" not in os.environ:
        # Or int64 would be int32, and models that compute with large numbers, BERT's masking
        # for one, others without anyone being told.
        jax.config.update("jax_enable_x64", True)


def keep_compiled(device: str, options: Any) -> str:
    """Have JAX keep what it compiles, if the options say so: the folder, or `off: ` and why.

    Raises:
        RequestError: the folder can't be made.
    """
    import jax

    if options.compile_cache == "off":
        return "off: --jax.compile_cache off"
    folder = Path(options.cache_dir or cache_folders.folder("jax"))
    # JAX's key has the processor's instructions in some versions alone.
    folder = folder / f"{jax.__version__}-{device}-{compile_cache_key.processor_fingerprint()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(
            f"compiled steps cannot be kept in {folder}: {error.strerror}; name another folder by "
            "--jax.cache_dir, or keep none by --jax.compile_cache off"
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    if device == "cpu":
        _let_all_workers_write()
    return str(folder)


@cache
def _let_all_workers_write() -> None:
    """Have each of several processes write what it compiled, and not the first alone.

    JAX takes the key of what is compiled to be the same in all of them. On a CPU it is not: the
    fingerprint of the devices' topology is in it, which is each process's own. So all but the
    first would compile at every start, and the first wait for them.
    """
    from jax._src import compiler, distributed

    plain = getattr(compiler, "_cache_write", None)
    if plain is None:  # a JAX that does it otherwise: starts are slower, and no less right
        return

    def write(*args: Any, **kwargs: Any) -> None:
        state = distributed.global_state
        process_id, state.process_id = state.process_id, 0
        try:
            plain(*args, **kwargs)
        finally:
            state.process_id = process_id

    compiler._cache_write = write


def rules(device: str, options: Any) -> Any:
    """How graphs are lowered: `auto` is on where it pays."""
    from accbench.engines.jax import lowering
    from accbench.engines.jax.lowering import torch_calls

    by_torch = device == "cpu" and options.torch_kernels == "on"
    convolutions, products = _of_torch() if by_torch else ((), ())
    if by_torch:
        torch_calls.register()

    def is_on(option: str) -> bool:
        return option == "on" or (option == "auto" and device == "cpu")

    return lowering.Rules(
        channels_last=is_on(options.channels_last),
        products_for_1x1=is_on(options.products_for_1x1),
        products_for_patches=is_on(options.products_for_patches),
        products_for_small_images=is_on(options.products_for_small_images),
        weights_by_image=is_on(options.weights_by_image),
        torch_convolutions=convolutions,
        torch_products=products,
        torch_pools=by_torch,
        # In float32 XLA's fused norms take as long, and less memory.
        torch_norms=("bfloat16", "float16") if by_torch else (),
        torch_updates=by_torch,
        pools_by_place=options.pools_by_place == "on",
    )


def _of_torch() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The dtypes of whose convolutions, and products, torch's kernels on this CPU are ahead.

    In 16 bits oneDNN's convolutions take instructions for these, and products those of bfloat16
    (AMX, AVX512_BF16): else XLA, which widens them to 32, is the faster.
    """
    import torch

    convolutions, products = ["float32"], ["float32"]
    if torch.backends.mkldnn.is_available():
        of = torch.ops.mkldnn
        convolutions += ["bfloat16"] * of._is_mkldnn_bf16_supported()
        convolutions += ["float16"] * of._is_mkldnn_fp16_supported()
        has = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
        if any(getattr(torch.cpu, name, lambda: False)() for name in has):
            products.append("bfloat16")
    return tuple(convolutions), tuple(products)


def attends(rules: Any, dtype: Any) -> bool:
    """Whether attention in torch's dtype, None for float32, is to be captured whole."""
    return str(dtype or "float32").removeprefix("torch.") in rules.torch_products
