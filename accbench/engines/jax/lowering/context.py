"""What a row may ask of the run that it is part of: random keys, and the rules in force."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Rules:
    """Named choices of how graphs are lowered; results agree but for rounding.

    Those of convolutions pay on a CPU, where XLA doesn't choose layouts itself.
    """

    channels_last: bool = False
    """Carry images as NHWC from a convolution on to the next, through all between them."""
    products_for_1x1: bool = False
    """Compute convolutions with 1 x 1 kernels as products of matrices. Needs channels_last."""
    products_for_patches: bool = False
    """Compute convolutions whose windows lie side by side as products. Needs channels_last."""
    products_for_small_images: bool = False
    """Compute convolutions with up to nine output pixels as products. Needs channels_last."""
    weights_by_image: bool = False
    """Compute the gradient of a convolution's weight as a product an image, where that has 128
    output pixels and more. Needs channels_last."""
    pools_by_place: bool = False
    """Compute the gradient of max-pooling as a sum over the places of a window."""
    torch_convolutions: tuple[str, ...] = ()
    """Have torch compute the convolutions of these dtypes (`float32`, ...), called from XLA's
    program. On a CPU only. Needs channels_last."""
    torch_products: tuple[str, ...] = ()
    """Likewise large products of matrices, and attention that was captured whole."""
    torch_pools: bool = False
    """Likewise max-pooling over two axes."""
    torch_norms: tuple[str, ...] = ()
    """Likewise BatchNorm in training, of these dtypes."""
    torch_updates: bool = False
    """Likewise AdamW, where no step is left out."""
    float64_as_float32: bool = False
    """Compute float64 tensors in float32 where JAX has no float64; else they are refused."""


class Context:
    """One run of a graph."""

    def __init__(self, key: Any, rules: Rules) -> None:
        """
        Args:
            key: the run's random key, a jax key array; None if nothing is to be drawn.
        """
        self.rules = rules
        self._key = key
        self._num_draws = 0
        self.node: Any = None  # the fx.Node whose row runs

    def next_key(self) -> Any:
        """A key for one random operation: the run's, folded with that operation's number.

        Raises:
            ValueError: the run has no key.
        """
        import jax

        if self._key is None:
            raise ValueError("the graph draws random numbers, and run_graph was given no key")
        self._num_draws += 1
        return jax.random.fold_in(self._key, self._num_draws)
