"""What a row can read of the run that it is part of: random keys, and the rules in force."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Rules:
    """Named choices of how graphs are lowered; results agree but for rounding.

    The rules for convolutions pay on a CPU, where XLA does not choose layouts itself.
    """

    channels_last: bool = False
    """Carry images as NHWC from one convolution to the next, through all between them."""
    products_for_1x1: bool = False
    """Compute convolutions with 1 x 1 kernels as products of matrices. Needs channels_last."""
    products_for_patches: bool = False
    """Compute convolutions whose windows lie side by side as products. Needs channels_last."""
    products_for_small_images: bool = False
    """Compute convolutions with up to nine output pixels as products. Needs channels_last."""
    weights_by_image: bool = False
    """Compute the gradient of a convolution's weight as one product for each image, where that has
    128 output pixels and more. Needs channels_last."""
    pools_by_place: bool = False
    """Compute the gradient of max-pooling as a sum over the positions in a window."""
    exact_float32: bool = False
    """Have XLA compute products of float32 in float32 on an NVIDIA GPU, not in TF32."""
    aligned_products: bool = False
    """Add zeros to the matrices of large products in 16 bits until their sizes are multiples of 8,
    as an NVIDIA GPU's matrix units like them."""
    attention_by: str | None = None
    """Have `jax.nn.dot_product_attention` compute attention without dropout in 16 bits, by this
    implementation of its: "cudnn" on an NVIDIA GPU, or "xla". None: attention is decomposed."""
    torch_convolutions: tuple[str, ...] = ()
    """Have torch compute the convolutions of these dtypes (`float32`, ...), called from XLA's
    program. On a CPU only. Needs channels_last."""
    torch_products: tuple[str, ...] = ()
    """Have torch compute large matrix products, and attention that was captured as one operation,
    in these dtypes."""
    torch_pools: bool = False
    """Have torch compute max-pooling over two axes."""
    torch_norms: tuple[str, ...] = ()
    """Have torch compute BatchNorm in training, in these dtypes."""
    torch_updates: bool = False
    """Have torch compute AdamW, where no step can be skipped."""
    float64_as_float32: bool = False
    """Compute float64 tensors in float32 where JAX has no float64; else they are refused."""


class Context:
    """The state of one run of a graph.

    Args:
        key: the run's random key, a jax key array; None if nothing is to be drawn.
        rules: how the graph is lowered.
    """

    def __init__(self, key: Any, rules: Rules) -> None:
        self.rules = rules
        self._key = key
        self._num_draws = 0
        self.node: Any = None  # the fx.Node that is running

    def next_key(self) -> Any:
        """Return a key for one random operation: the run's, folded with the operation's number.

        Raises:
            ValueError: the run has no key.
        """
        import jax

        if self._key is None:
            raise ValueError("the graph draws random numbers, and run_graph was given no key")
        self._num_draws += 1
        return jax.random.fold_in(self._key, self._num_draws)
