"""Averaging of gradients over ranks, in the graph or on the host.

In the graph it overlaps with the backward pass; the host's form is for devices without collectives
between processes.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

# Parameters that are used first get their gradients last, and no computation is left to overlap
# with their reduction: that bucket is kept small.
_LAST_BUCKET_BYTES = 2**20


def average_in_graph(
    parameters: Sequence[nn.Parameter], device: torch.device, world_size: int, bucket_bytes: int
) -> None:
    """Average the gradients over the ranks, in place; each parameter has one.

    Args:
        parameters: in the order in which a forward pass uses them, as far as is known.
        device: XLA's device of this process.
        world_size: number of ranks.
        bucket_bytes: gradients are reduced together up to this size.
    """
    import torch_xla
    import torch_xla.core.xla_model as xm

    gradients = [p.grad for p in parameters if p.grad is not None]
    buckets = _buckets_in_order(gradients, bucket_bytes)[::-1]
    for position, bucket in enumerate(buckets, start=1):
        # torch_xla has each all-reduce wait for the one before by a token, so that XLA could not
        # start two; without it the order is the same, for every process compiles one program.
        # A small last one keeps its token: XLA's scheduler, which begins at the end, would choose
        # another as the one that nothing overlaps with, and delay the gradients of its weights.
        waits = 1 < position == len(buckets) and _num_bytes(bucket) <= _LAST_BUCKET_BYTES
        if not waits:
            torch_xla._XLAC._set_all_reduce_token(str(device), None)
        xm.all_reduce(xm.REDUCE_SUM, bucket, scale=1.0 / world_size)


def _num_bytes(gradients: Sequence[torch.Tensor]) -> int:
    return sum(gradient.numel() * gradient.element_size() for gradient in gradients)


def _buckets_in_order(gradients: list[torch.Tensor], bucket_bytes: int) -> list[list[torch.Tensor]]:
    buckets: list[list[torch.Tensor]] = []
    size, limit = 0, 0
    for gradient in gradients:
        num_bytes = _num_bytes([gradient])
        if size + num_bytes > limit:
            limit = bucket_bytes if buckets else min(bucket_bytes, _LAST_BUCKET_BYTES)
            buckets.append([])
            size = 0
        buckets[-1].append(gradient)
        size += num_bytes
    return buckets


def average_on_host(
    parameters: list[nn.Parameter], device: torch.device, world_size: int, bucket_bytes: int
) -> None:
    """Average the gradients over the ranks through gloo, in buckets of `bucket_bytes`."""
    import torch_xla

    buckets = _buckets_by_dtype(parameters, bucket_bytes)
    flat_on_device = []
    for bucket in buckets:
        flat_on_device.append(torch.cat([p.grad.reshape(-1) for p in bucket if p.grad is not None]))
        for parameter in bucket:
            parameter.grad = None  # so that only the buckets are computed and stay in memory
    # All that is traced so far runs here, as the step's first graph. Copying a bucket alone would
    # run what it depends on, and run that again with the rest later.
    torch_xla.sync()
    for bucket, on_device in zip(buckets, flat_on_device, strict=True):
        on_host = on_device.cpu()  # waits: gloo needs the values
        dist.all_reduce(on_host)
        on_host /= world_size
        averaged = on_host.to(device)
        sizes = [p.numel() for p in bucket]
        for parameter, gradient in zip(bucket, averaged.split(sizes), strict=True):
            parameter.grad = gradient.view_as(parameter)


def _buckets_by_dtype(
    parameters: list[nn.Parameter], capacity_bytes: int
) -> list[list[nn.Parameter]]:
    """Group neighbours of one dtype into buckets of up to `capacity_bytes`, at least one each."""
    buckets: list[list[nn.Parameter]] = []
    filled_bytes = 0
    for parameter in parameters:
        size_bytes = parameter.numel() * parameter.element_size()
        fits = buckets and filled_bytes + size_bytes <= capacity_bytes
        if fits and buckets[-1][0].dtype == parameter.dtype:
            buckets[-1].append(parameter)
            filled_bytes += size_bytes
        else:
            buckets.append([parameter])
            filled_bytes = size_bytes
    return buckets
