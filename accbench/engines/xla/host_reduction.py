"""Gradients averaged on the host, for devices without collectives between processes."""

import torch
import torch.distributed as dist
from torch import nn


def average(
    parameters: list[nn.Parameter], device: torch.device, world_size: int, bucket_bytes: int
) -> None:
    """Average the gradients over the ranks through gloo, in buckets of `bucket_bytes`."""
    import torch_xla

    buckets = _buckets(parameters, bucket_bytes)
    flat = []
    for bucket in buckets:
        flat.append(torch.cat([p.grad.reshape(-1) for p in bucket if p.grad is not None]))
        for parameter in bucket:
            parameter.grad = None  # so that only the buckets are computed and kept
    # All that is traced so far runs here, as the step's first graph. Copying a
    # bucket alone would run what it needs, and all the rest a second time later.
    torch_xla.sync()
    for bucket, on_device in zip(buckets, flat, strict=True):
        on_host = on_device.cpu()  # waits: gloo needs the values
        dist.all_reduce(on_host)
        on_host /= world_size
        averaged = on_host.to(device)
        sizes = [p.numel() for p in bucket]
        for parameter, gradient in zip(bucket, averaged.split(sizes), strict=True):
            parameter.grad = gradient.view_as(parameter)


def _buckets(parameters: list[nn.Parameter], capacity_bytes: int) -> list[list[nn.Parameter]]:
    """Neighbours together up to `capacity_bytes`, one type a bucket; at least one each."""
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
