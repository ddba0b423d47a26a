"""A `DataLoader` whose batches are on the device when the loop asks for them."""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from accbench.data.prefetch import BackgroundGenerator


def naming_dead_workers(batches: Iterator[Any]) -> Iterator[Any]:
    """A loader's batches, with an error that says so where a worker process is gone.

    torch's own says it too, except where the process dies between announcing a
    batch and handing over its memory.
    """
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(
                "DataLoader worker exited while it handed over a batch: was it killed, for "
                "example because the machine is out of memory?"
            ) from error
        yield batch
        del batch


class DataLoaderX(DataLoader[Any]):
    """A `DataLoader` whose batches come to the device ahead of the loop that uses them.

    Args:
        local_rank: number of the CUDA device, where there is one.
        device: where batches go: `cuda:local_rank` if CUDA is there, else the CPU,
            or for example `torch_xla.device()`.
        max_prefetch: batches ahead of the loop at most.
        dataloader_arguments: as for `DataLoader`; on CUDA `pin_memory` is on
            unless it says otherwise.
    """

    def __init__(
        self,
        local_rank: int,
        *,
        device: torch.device | str | None = None,
        max_prefetch: int = 6,
        **dataloader_arguments: Any,
    ) -> None:
        if device is None:
            device = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
        self.local_rank, self.device = local_rank, torch.device(device)
        self.max_prefetch = max_prefetch
        self._num_delivered = 0
        self._running: weakref.ref[BackgroundGenerator] | None = None
        dataloader_arguments.setdefault("pin_memory", self.device.type == "cuda")
        super().__init__(**dataloader_arguments)

    def __iter__(self) -> Any:
        running = self._running() if self._running is not None else None
        if running is not None and self.persistent_workers:
            running.close()  # left early; torch gives the same worker processes to this pass
        self._num_delivered = 0
        on_host = naming_dead_workers(super().__iter__())
        batches = BackgroundGenerator(
            on_host, self.local_rank, self.max_prefetch, device=self.device
        )
        self._running = weakref.ref(batches)
        return _Counted(batches, self)

    def set_epoch(self, epoch: int) -> None:
        """Pass it to the sampler, or the batch sampler, that has it."""
        for sampler in self._samplers():
            if hasattr(sampler, "set_epoch"):
                if getattr(sampler, "epoch", None) != epoch:
                    self._num_delivered = 0  # those were of the epoch before
                sampler.set_epoch(epoch)
                return

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state as of the batches that the loop got, not those fetched ahead.

        Raises:
            TypeError: the sampler has no state.
        """
        sampler, unit = self._resumable()
        state: dict[str, Any] = sampler.state_dict(self._num_delivered * unit)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there when iterated next.

        Raises:
            TypeError: the sampler has no state.
            ValueError: the state does not fit.
        """
        self._num_delivered = 0
        self._resumable()[0].load_state_dict(state)

    def _samplers(self) -> list[Any]:
        return [self.batch_sampler, self.sampler, getattr(self.batch_sampler, "sampler", None)]

    def _resumable(self) -> tuple[Any, int]:
        """(sampler, how many of its items make a batch)"""
        batches: Any = self.batch_sampler
        if hasattr(batches, "state_dict"):
            return batches, 1
        if batches is None:
            sampler, unit = self.sampler, 1
        elif getattr(type(batches), "__iter__", None) is BatchSampler.__iter__:
            sampler, unit = batches.sampler, batches.batch_size
        else:  # who knows which samples have come by now
            sampler, unit = batches, 1
        if hasattr(sampler, "state_dict"):
            return sampler, unit
        kind = type(sampler)
        raise TypeError(
            f"{kind.__module__}.{kind.__name__} has no state; take "
            "accbench.data.samplers.DistributedSampler, also in torch's BatchSampler"
        )


class _Counted:
    """Counts what the loop gets. Holds the only strong reference to the thread's owner."""

    def __init__(self, batches: BackgroundGenerator, loader: DataLoaderX) -> None:
        self._batches, self._loader = batches, loader

    def __iter__(self) -> "_Counted":
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        if self._is_latest():
            self._loader._num_delivered += 1
        return batch

    def _is_latest(self) -> bool:
        running = self._loader._running
        return running is not None and running() is self._batches

    def close(self) -> None:
        """End the thread and free what it fetched."""
        self._batches.close()
