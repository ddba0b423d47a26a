"""Averaging of gradients over ranks, in the graph or on the host.

In the graph it overlaps with the backward pass; the host's form is for devices without collectives
between processes.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from accbench.distributed import used_parameters
from accbench.distributed.process_group import Topology
from accbench.distributed.strategies import Strategy
from accbench.errors import RequestError


class XlaDataParallel(Strategy):
    """Data parallel in XLA's graph, or on the host where processes have no collectives.

    Args:
        topology: the ranks.
        device: XLA's.
        in_graph: whether XLA reduces.
        bucket_bytes: gradients are reduced together up to this size.
    """

    def __init__(
        self, topology: Topology, device: torch.device, in_graph: bool, bucket_bytes: int
    ) -> None:
        super().__init__(topology)
        self.device, self.bucket_bytes = device, bucket_bytes
        self.collectives = "in_graph" if in_graph else "host"
        self._requires_grad: list[bool] = []
        self._used_on_any_rank: list[bool] = []

    def reduce(self, parameters: list[nn.Parameter], may_change: bool = False) -> None:
        """Average gradients over the ranks, in place.

        Args:
            parameters: in the order in which a forward pass uses them, as far as is known.
            may_change: whether other parameters may have gradients than in the first step.

        Raises:
            RequestError: a gradient is there that was on no rank in the first step.
        """
        if self.topology.world_size == 1:
            return
        average = average_in_graph if self.collectives == "in_graph" else average_on_host
        used = self._used(parameters, may_change or self.collectives == "host")
        average(used, self.device, self.topology.world_size, self.bucket_bytes)

    def _used(self, parameters: list[nn.Parameter], may_change: bool) -> list[nn.Parameter]:
        """Return those with a gradient on some rank; on the others it is zeros from here on.

        What is averaged in the graph must be the same on all ranks. They tell each other each time
        if it may change, or else in the first step and when other parameters train.
        """
        requires_grad = [p.requires_grad for p in parameters]
        if may_change or requires_grad != self._requires_grad:
            self._requires_grad = requires_grad
            self._used_on_any_rank = used_parameters.has_grad_on_any_rank(parameters)
        if any(
            p.grad is not None and not is_used
            for p, is_used in zip(parameters, self._used_on_any_rank, strict=True)
        ):
            raise RequestError(
                "the loss depends on parameters that it did not depend on in the first step, on "
                "any worker; freeze them until then (requires_grad = False)"
            )
        return used_parameters.fill_missing_grads(parameters, self._used_on_any_rank)

    def average_probe(self, value: float) -> list[float]:
        import torch_xla

        probe = nn.Parameter(torch.zeros(2).to(self.device))
        probe.grad = torch.full((2,), value).to(self.device)
        self.reduce([probe])
        torch_xla.sync()
        averaged: list[float] = probe.grad.cpu().tolist()
        return averaged


# The parameters that are used first have their gradients last, and nothing is left to be done
# beside their reduction: it is kept short.
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
