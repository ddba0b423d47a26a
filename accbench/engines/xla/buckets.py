"""Averaging gradients over ranks in the graph, beside the backward pass that makes them."""

from collections.abc import Sequence

import torch
from torch import nn

# The parameters that are used first have their gradients last, and nothing is left to be done
# beside their reduction: it is kept short.
_LAST_BUCKET_BYTES = 2**20


def average(
    parameters: Sequence[nn.Parameter], device: torch.device, world_size: int, bucket_bytes: int
) -> None:
    """Average the gradients over the ranks, in place; each has one.

    Args:
        parameters: in the order in which a forward pass uses them, as far as is known.
        bucket_bytes: gradients are reduced together up to this size.
    """
    import torch_xla
    import torch_xla.core.xla_model as xm

    gradients = [p.grad for p in parameters if p.grad is not None]
    in_turn = _buckets(gradients, bucket_bytes)[::-1]
    for place, bucket in enumerate(in_turn, start=1):
        # torch_xla has each all-reduce wait for the one before by a token, so that XLA could not
        # start two; and XLA compiles the same program in every process, so their order is the same.
        # A small last one keeps it: XLA's scheduler, which begins at the end, would take another
        # for the one that nothing is left to hide, and put off all weights' gradients of that one.
        waits = 1 < place == len(in_turn) and _num_bytes(bucket) <= _LAST_BUCKET_BYTES
        if not waits:
            torch_xla._XLAC._set_all_reduce_token(str(device), None)
        xm.all_reduce(xm.REDUCE_SUM, bucket, scale=1.0 / world_size)


def _num_bytes(gradients: Sequence[torch.Tensor]) -> int:
    return sum(gradient.numel() * gradient.element_size() for gradient in gradients)


def _buckets(gradients: list[torch.Tensor], bucket_bytes: int) -> list[list[torch.Tensor]]:
    found: list[list[torch.Tensor]] = []
    size, limit = 0, 0
    for gradient in gradients:
        num_bytes = _num_bytes([gradient])
        if size + num_bytes > limit:
            limit = bucket_bytes if found else min(bucket_bytes, _LAST_BUCKET_BYTES)
            found.append([])
            size = 0
        found[-1].append(gradient)
        size += num_bytes
    return found
