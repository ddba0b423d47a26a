"""Kernels for operations that torch_xla lacks, or computes otherwise than torch."""

from accbench.engines.xla.kernels import (
    corrections,
    norms,
    pooling,
    recurrent,
    reductions,
    resizing,
)


def register_all(lean: bool) -> None:
    """Register every kernel for XLA's device in this process.

    Args:
        lean: take the norms that move few bytes on a GPU.
    """
    norms.replace_kernels(lean)
    for module in (corrections, pooling, recurrent, reductions, resizing):
        module.replace_kernels()
