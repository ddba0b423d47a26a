"""Gather what workers have in parts: an evaluation's results, and tensors in shards."""

import itertools
from typing import Any

import torch
import torch.distributed as dist

from accbench.data import nested
from accbench.distributed import process_group, whole_tensors
from accbench.errors import RequestError

# All workers gather equally often.
_num_calls = itertools.count()


class BatchPosition:
    """A worker's position in an epoch, for samplers that pad the last batch."""

    def __init__(
        self, sampler: Any, batch_size: int | None = None, num_local: int | None = None
    ) -> None:
        """Begin at the start of an epoch.

        Args:
            sampler: the loader's sampler, or its batch sampler's; None or another object if each
                worker's loader has samples of its own.
            batch_size: samples in all batches but the last; None if not known.
            num_local: this worker's samples in the epoch; None if not known.
        """
        self._batch_size, self._num_local = batch_size, num_local
        replicas = getattr(sampler, "num_replicas", None)
        in_turn = replicas is not None and not getattr(sampler, "contiguous", False)
        dataset = getattr(sampler, "dataset", None)
        self.num_samples = len(dataset) if in_turn and dataset is not None else None
        self.num_before = self.num_in_batch = 0

    def next(self, batch: Any) -> None:
        """Count a batch of this worker."""
        self.num_before += self.num_in_batch
        expected = self._batch_size
        if expected is not None and self._num_local is not None:
            expected = min(expected, self._num_local - self.num_before)
        self.num_in_batch = nested.num_rows(batch, expected)


def whole_on_host(nest: Any, timeout_s: float) -> Any:
    """Copy all tensors of a nest to the host, whole where they are in shards.

    Args:
        nest: tensors in any nesting.
        timeout_s: how long to wait for the other workers, in seconds.

    Raises:
        RequestError: tensors are in shards, and not all workers have come in time.
    """
    if any(map(whole_tensors.is_sharded, nested.tensors_of(nest))):
        occasion = f"accbench.to_host/{next(_num_calls)}"
        missing = process_group.missing_ranks(occasion, timeout_s)
        if missing:
            raise RequestError(
                f"run.to_host: workers {', '.join(map(str, missing))} have not called it within "
                f"{timeout_s:g} s: with --dp_shard each has a part of every tensor, so call it on "
                "all, and save on one what it returns"
            )

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        whole = whole_tensors.gathered(tensor)
        return whole.detach().to("cpu", copy=whole is tensor)

    return nested.mapped(nest, copied)


def gather(nest: Any, position: BatchPosition | None, world_size: int) -> Any:
    """Return all workers' tensors, joined along the first dimension, on the host.

    All workers call it, with the same nest; their first dimensions may differ. Results of the last
    batch are put into the order of the samples, without those that a distributed sampler has added
    so that all workers have equally many. Numbers, (), are each worker's own, by rank.

    Args:
        nest: tensors in any nesting; (N, ...) for the N samples of the last batch.
        position: position of the last batch; None behind the loop over a loader.
        world_size: the number of workers.

    Raises:
        RequestError: tensors are of different types or shapes on different workers.
    """

    def all_gather_tensor(tensor: Any) -> torch.Tensor:
        local = torch.atleast_1d(tensor.detach().cpu()).contiguous()
        parts = _all_gather(local) if world_size > 1 else [local]
        if position is None or position.num_samples is None or world_size == 1 or not tensor.dim():
            return torch.cat(parts)
        if any(len(part) != position.num_in_batch for part in parts):
            return torch.cat(parts)
        in_order = torch.stack(parts, 1).flatten(0, 1)
        left = position.num_samples - position.num_before * world_size
        return in_order[: max(0, left)]

    return nested.mapped(nest, all_gather_tensor, doing="gathered")


def _all_gather(local: torch.Tensor) -> list[torch.Tensor]:
    facts = process_group.all_gather_strings(f"{tuple(local.shape[1:])} of {local.dtype}")
    if len(set(facts)) > 1:
        raise RequestError(
            f"run.gather: workers have tensors of {', '.join(sorted(set(facts)))}; all but the "
            "first dimension must be the same"
        )
    lengths = [int(n) for (n,) in process_group.all_gather_values([float(len(local))])]
    longest = max(lengths)
    # Gloo supports bytes, but neither complex numbers nor all types of 8 and 16 bits.
    real = torch.view_as_real(local) if local.is_complex() else local
    padded = torch.zeros((longest, *real.shape[1:]), dtype=real.dtype)
    padded[: len(real)] = real
    parts = [torch.zeros_like(padded) for _ in lengths]
    if padded.numel():
        dist.all_gather([_bytes(part) for part in parts], _bytes(padded))
    unpadded = [part[:length] for part, length in zip(parts, lengths, strict=True)]
    return [torch.view_as_complex(part) for part in unpadded] if local.is_complex() else unpadded


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
