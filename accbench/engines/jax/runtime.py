"""The engine's options applied to JAX and to the lowering of graphs."""

import importlib.util
import os
from functools import cache
from pathlib import Path
from typing import Any

from accbench.config import TaskConfig
from accbench.engines.common import compile_cache_key
from accbench.errors import RequestError
from accbench.pjrt import nvidia, xla_flags
from accbench.recording.terminal import log
from accbench.system import cache_folders, extras

PLATFORMS = {"cpu": "cpu", "cuda": "cuda,cpu", "tpu": "tpu,cpu"}
"""Device -> JAX's platforms: its own, and the host's, through which arrays are copied."""


_PLUGINS = {"cuda": ("jax_cuda13_plugin", "jax_cuda12_plugin"), "tpu": ("libtpu",)}
_EXTRAS = {"cuda": "jax-cuda13", "tpu": "jax-tpu"}


def device_problem(task: TaskConfig) -> str | None:
    """Return why JAX cannot compute on the task's device here, and the remedy; None if it can."""
    wanted = _PLUGINS.get(task.device, ())
    if wanted and not any(importlib.util.find_spec(name) for name in wanted):
        return (
            f"--engine jax on {task.device} needs JAX's plug-in for it, one of "
            f"{', '.join(wanted)}, which is not installed; use --device cpu or install it: "
            f"{extras.install_command(_EXTRAS[task.device])}"
        )
    return nvidia.problem(task.nproc_per_node) if task.device == "cuda" else None


def cuda_toolkit(device: str) -> Path | None:
    """Return the folder of ptxas and libdevice for CUDA_ROOT, which JAX reads; None if none.

    JAX by itself takes the package nvidia.cu13 for a toolkit that has no libdevice, and overwrites
    the flag xla_gpu_cuda_data_dir.
    """
    return nvidia.toolkit(nvidia.find_jax_plugin()) if device == "cuda" else None


def configure(device: str, flags: str, tells: bool = False) -> None:
    """Set JAX's platforms, XLA's flags and the width of numbers; the environment's values win.

    Call it before JAX is first used in the process.

    Args:
        device: "cpu", "cuda" or "tpu".
        flags: XLA flags of the user's.
        tells: log which flags of accbench's the plug-in does not know.
    """
    unknown = xla_flags.unknown_in_table(nvidia.find_jax_plugin()) if device == "cuda" else ()
    if unknown and tells:
        log.warning(xla_flags.left_out_notice(unknown))
    merged = xla_flags.merge(device, flags, unknown)
    if merged:  # XLA reads them once, when a device is first used
        os.environ["XLA_FLAGS"] = merged
    import jax

    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", PLATFORMS[device])
    if "JAX_ENABLE_X64" not in os.environ:
        # Or int64 would be int32, which silently changes models that compute with large
        # numbers, such as BERT's masking.
        jax.config.update("jax_enable_x64", True)
    if jax.config.values["jax_platforms"] == "cpu":
        _load_no_plugins()


def _load_no_plugins() -> None:
    """Keep JAX from loading the plug-ins of other platforms, which it loads wanted or not.

    That of CUDA takes 375 MiB and a quarter of a second in every process, and where its version is
    not JAX's, which JAX checks only if CUDA is wanted, a profile ends in a segmentation fault.
    """
    from jax._src import xla_bridge

    if hasattr(xla_bridge, "discover_pjrt_plugins"):
        xla_bridge.discover_pjrt_plugins = lambda: None


def scratch_bytes(compiled: Any) -> int:
    """Return what a compiled step takes beside the arrays that are there before it."""
    memory = compiled.memory_analysis()
    if memory is None:
        return 0
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(memory.temp_size_in_bytes + results)


def enable_compile_cache(device: str, options: Any) -> str:
    """Have JAX keep compiled programs on disk, if the options say so.

    Args:
        device: "cpu", "cuda" or "tpu".
        options: the engine's.

    Returns:
        The folder, or `off: ` and the reason.

    Raises:
        RequestError: the folder cannot be made.
    """
    import jax

    if options.compile_cache == "off":
        return "off: --jax.compile_cache off"
    folder = Path(options.cache_dir or cache_folders.folder("jax"))
    # Only some versions of JAX have the processor's instructions in their key.
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
        _let_all_ranks_write_cache()
    return str(folder)


@cache
def _let_all_ranks_write_cache() -> None:
    """Have every process write what it compiled to the cache, not only the first.

    JAX assumes that all processes have the same key for a program. On a CPU they have not: each
    process's own fingerprint of the devices' topology is in it. So all but the first would
    compile at every start, and the first wait for them.
    """
    from jax._src import compiler, distributed

    original = getattr(compiler, "_cache_write", None)
    if original is None:  # other versions of JAX: starts are slower, and as correct
        return

    def write(*args: Any, **kwargs: Any) -> None:
        state = distributed.global_state
        process_id, state.process_id = state.process_id, 0
        try:
            original(*args, **kwargs)
        finally:
            state.process_id = process_id

    compiler._cache_write = write


def _attention_by(device: str, options: Any, compute_capability: str | None) -> str | None:
    """Return which of JAX's implementations computes attention; None for our own form of it."""
    if options.attention == "auto":
        is_old = compute_capability and not nvidia.has_cudnn_attention(compute_capability)
        return "cudnn" if device == "cuda" and not is_old else None
    return "cudnn" if options.attention == "cudnn" else None


def lowering_rules(
    device: str, options: Any, tf32: bool = False, compute_capability: str | None = None
) -> Any:
    """Return how graphs are lowered; `auto` is on where it pays.

    Args:
        device: "cpu", "cuda" or "tpu".
        options: the engine's.
        tf32: let float32 products round to TF32 on CUDA.
        compute_capability: of the GPU, such as "9.0"; None for one that is not known.
    """
    from accbench.engines.jax import lowering
    from accbench.engines.jax.lowering import torch_calls

    use_torch = device == "cpu" and options.torch_kernels == "on"
    convolutions, products = _torch_kernel_dtypes() if use_torch else ((), ())
    if use_torch:
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
        torch_pools=use_torch,
        # In float32 XLA's fused norms are as fast, and take less memory.
        torch_norms=("bfloat16", "float16") if use_torch else (),
        torch_updates=use_torch,
        pools_by_place=options.pools_by_place == "on",
        exact_float32=device == "cuda" and not tf32,
        aligned_products=options.aligned_products == "on"
        or (options.aligned_products == "auto" and device == "cuda"),
        attention_by=_attention_by(device, options, compute_capability),
    )


def _torch_kernel_dtypes() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the dtypes of convolutions, and of products, where torch's CPU kernels are faster.

    In 16 bits oneDNN's convolutions take instructions for these, and products those of bfloat16
    (AMX, AVX512_BF16). Without them XLA, which widens to 32 bits, is faster.
    """
    import torch

    convolutions, products = ["float32"], ["float32"]
    if torch.backends.mkldnn.is_available():
        mkldnn = torch.ops.mkldnn
        convolutions += ["bfloat16"] * mkldnn._is_mkldnn_bf16_supported()
        convolutions += ["float16"] * mkldnn._is_mkldnn_fp16_supported()
        probes = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
        if any(getattr(torch.cpu, name, lambda: False)() for name in probes):
            products.append("bfloat16")
    return tuple(convolutions), tuple(products)


def keeps_attention(rules: Any, dtype: Any) -> bool:
    """Return whether attention is captured as one operation.

    Args:
        rules: how graphs are lowered.
        dtype: torch's; None for float32.
    """
    return str(dtype or "float32").removeprefix("torch.") in rules.torch_products
