"""Flags of engine jax, `--jax.NAME`."""

import dataclasses
from typing import Literal

from accbench import engines
from accbench.config.field import flag


@dataclasses.dataclass(frozen=True)
class JaxOptions(engines.Engine.Options):
    """Options of the engine jax."""

    compile_cache: Literal["on", "off"] = flag("on", "Keep compiled steps on disk.")
    cache_dir: str | None = flag(
        None,
        "The cache's folder. Unset: accbench/jax in the user's cache folder.",
        is_path=True,
    )
    torch_kernels: Literal["on", "off"] = flag(
        "on",
        "On a CPU, let XLA's program call torch's kernels (oneDNN, MKL) for convolutions, "
        "large matrix products, attention and max-pooling, as on a GPU it calls cuDNN and "
        "cuBLAS.",
    )
    channels_last: Literal["auto", "on", "off"] = flag(
        "auto",
        "Carry images as NHWC from one convolution to the next. auto: on a CPU; elsewhere XLA "
        "chooses layouts itself.",
    )
    products_for_1x1: Literal["auto", "on", "off"] = flag(
        "auto",
        "Compute 1 x 1 convolutions as matrix products, channels last. auto: on a CPU.",
    )
    products_for_patches: Literal["auto", "on", "off"] = flag(
        "auto",
        "Compute convolutions whose windows do not overlap as matrix products, for example the "
        "patches of a vision transformer. auto: on a CPU.",
    )
    products_for_small_images: Literal["auto", "on", "off"] = flag(
        "auto",
        "Compute convolutions with at most nine output pixels as matrix products. auto: on a CPU.",
    )
    weights_by_image: Literal["auto", "on", "off"] = flag(
        "auto",
        "Compute the weight gradients of convolutions with 128 or more output pixels as one "
        "matrix product per image, channels last. auto: on a CPU.",
    )
    pools_by_place: Literal["on", "off"] = flag(
        "on",
        "Compute the gradients of max-pooling as a sum over the positions in a window.",
    )
    lean: Literal["auto", "on", "off"] = flag(
        "auto",
        "In 16 bits, compute BatchNorm with its ReLU, and attention, by accbench's own "
        "functions that move fewer bytes, with CUDA's casts. auto: on CUDA.",
    )
    attention: Literal["auto", "cudnn", "xla"] = flag(
        "auto",
        "What computes attention in 16 bits without mask and dropout on CUDA: cuDNN, which writes "
        "no scores to memory, or XLA. auto: cudnn on a GPU of compute capability 8.0 (Ampere) or "
        "more.",
    )
    aligned_products: Literal["auto", "on", "off"] = flag(
        "auto",
        "In 16 bits, compute large matrix products with zeros at their edges, until their sizes "
        "are multiples of 8, for example that of GPT-2's vocabulary. auto: on CUDA.",
    )
    evaluation: Literal["auto", "compiled", "eager"] = flag(
        "auto",
        "Evaluate by compiled functions on the device, or by torch on the host. auto: "
        "compiled, except on a CPU, where torch's operations are as fast and need no "
        "compilation.",
    )
    gather: Literal["auto", "once", "layers"] = flag(
        "auto",
        "With --dp_shard, gather all parameters once a step, or each layer's where it computes, "
        "forward and backward, which takes less memory. auto: layers for 1 GiB of parameters and "
        "more, except on a CPU.",
    )
    flags: str = flag(
        "",
        "More XLA flags, `name=value` separated by blanks; those in XLA_FLAGS win.",
    )
    shard: bool = flag(
        False,
        "The same as --dp_shard auto.",
    )
    find_unused_parameters: bool = flag(
        False,
        "In your own loops, with several workers: the same as --ddp.find_unused_parameters.",
    )

    def gathers_late(self, device: str, num_bytes: int) -> bool:
        """Return whether sharded weights of so many bytes are gathered where they are used."""
        if self.gather == "auto":
            return device != "cpu" and num_bytes >= _MIN_LATE_BYTES
        return self.gather == "layers"


# Parameters of fewer bytes may live through a step.
_MIN_LATE_BYTES = 2**30
