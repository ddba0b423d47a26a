"""Kernels for operations that torch_xla lacks, or computes differently from torch."""

from accbench.engines.xla.kernels import (
    corrections,
    norms,
    pooling,
    recurrent,
    reductions,
    resizing,
)


def register_all(single_pass: bool) -> None:
    """Register every kernel for XLA's device in this process.

    Args:
        single_pass: compute the norms' statistics in one pass through memory; see `norms`.
    """
    norms.replace_kernels(single_pass)
    for module in (corrections, pooling, recurrent, reductions, resizing):
        module.replace_kernels()
