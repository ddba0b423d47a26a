"""A `DataLoader` whose batches are on the device when the loop asks for them."""

import signal
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from accbench.data import shared_memory
from accbench.data.batch_samplers import IterationBasedBatchSampler
from accbench.data.prefetch import BackgroundGenerator
from accbench.errors import RequestError

# How long a worker process whose connection broke may take to end. The system closes its files
# first, and then reports its death.
_DEATH_TIMEOUT_S = 5.0


def name_dead_workers(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield a loader's batches, with a clear error if a worker process has died.

    torch reports dead workers too, except where the process dies between announcing a batch and
    handing over its memory. A data set's own error stays unchanged.
    """
    workers = getattr(batches, "_workers", [])
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except RuntimeError as error:
            if shared_memory.is_full(error) or _has_died_of_memory(workers):
                raise RequestError(shared_memory.shortage_message()) from error
            raise
        except (EOFError, ConnectionError) as error:
            # Raised before the system reports the process's death, this error would be followed in
            # the main thread by torch's, which may come while this one is printed.
            dead = None if _is_from_inside_a_worker(error) else _worker_that_died(workers)
            if dead is None:
                raise
            raise RuntimeError(
                f"DataLoader worker (process {dead.pid}) exited with {dead.exitcode} while it "
                "handed over a batch: was it killed, for example because the machine is out of "
                "memory?"
            ) from error
        yield batch
        del batch


def _is_from_inside_a_worker(error: BaseException) -> bool:
    # torch.utils.data raises it again here, with the worker's traceback as its text.
    return str(error).startswith("Caught ")


def _has_died_of_memory(workers: list[Any]) -> bool:
    # A process that writes to missing shared memory gets this signal.
    return any(worker.exitcode == -signal.SIGBUS for worker in workers)


def _worker_that_died(workers: list[Any]) -> Any | None:
    end_s = time.monotonic() + _DEATH_TIMEOUT_S
    while workers and time.monotonic() < end_s:
        for worker in workers:
            if not worker.is_alive():
                return worker
        time.sleep(0.01)
    return None


class DataLoaderX(DataLoader[Any]):
    """A `DataLoader` whose batches come to the device ahead of the loop that uses them.

    Args:
        local_rank: number of the CUDA device, where there is one.
        device: where batches go, for example `torch_xla.device()`; None for `cuda:local_rank` if
            there is CUDA, else the CPU.
        max_prefetch: the most batches fetched ahead of the loop.
        dataloader_arguments: as for `DataLoader`; on CUDA `pin_memory` is on by default.
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
        self._passes = _Passes()
        # The pass that uses the persistent worker processes.
        self._persistent: weakref.ref[BackgroundGenerator] | None = None
        dataloader_arguments.setdefault("pin_memory", self.device.type == "cuda")
        super().__init__(**dataloader_arguments)

    def __iter__(self) -> Any:
        earlier = self._persistent() if self._persistent is not None else None
        # Otherwise torch would take the worker processes from a loop that is still running.
        are_taken = self.persistent_workers and earlier is not None and earlier.is_fetching
        with shared_memory.explained():
            on_host = self._get_iterator() if are_taken else super().__iter__()
            shared_memory.explain_signals()
        batches = BackgroundGenerator(
            name_dead_workers(on_host), self.local_rank, self.max_prefetch, device=self.device
        )
        if not are_taken:
            self._persistent = weakref.ref(batches)
        return _CountedBatches(batches, self._passes)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the sampler, or the batch sampler, that takes it.

        An `IterationBasedBatchSampler` counts its epochs itself.
        """
        if isinstance(self.batch_sampler, IterationBasedBatchSampler):
            return
        for sampler in self._samplers():
            if hasattr(sampler, "set_epoch"):
                if getattr(sampler, "epoch", None) != epoch:
                    self._passes.forget()  # their batches were of the epoch before
                sampler.set_epoch(epoch)
                return

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state for the batches that the loop got, not those read ahead.

        Of several loops at once, the one that began last counts.

        Raises:
            TypeError: the sampler has no state.
        """
        sampler, unit = self._resumable()
        state: dict[str, Any] = sampler.state_dict(self._passes.num_delivered * unit)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state at the next iteration.

        Raises:
            TypeError: the sampler has no state.
            ValueError: the state does not fit.
        """
        self._passes.forget()
        self._resumable()[0].load_state_dict(state)

    def _samplers(self) -> list[Any]:
        return [self.batch_sampler, self.sampler, getattr(self.batch_sampler, "sampler", None)]

    def _resumable(self) -> tuple[Any, int]:
        """Return the sampler with a state, and how many of its items make a batch."""
        batches: Any = self.batch_sampler
        if hasattr(batches, "state_dict"):
            return batches, 1
        if batches is None:
            sampler, unit = self.sampler, 1
        elif getattr(type(batches), "__iter__", None) is BatchSampler.__iter__:
            sampler, unit = batches.sampler, batches.batch_size
        else:  # it is unknown which samples have come by now
            sampler, unit = batches, 1
        if hasattr(sampler, "state_dict"):
            return sampler, unit
        kind = type(sampler)
        raise TypeError(
            f"{kind.__module__}.{kind.__name__} has no state; take "
            "accbench.data.samplers.DistributedSampler, also in torch's BatchSampler"
        )


class _Pass:
    num_delivered = 0


class _Passes:
    """Counts the batches that each loop over a loader got."""

    def __init__(self) -> None:
        self._running: list[_Pass] = []
        self._last = _Pass()  # the pass that ended last

    @property
    def num_delivered(self) -> int:
        """Batches of the running loop that began last, or else of the loop that ended last."""
        return (self._running[-1] if self._running else self._last).num_delivered

    def begin(self) -> _Pass:
        self._running.append(_Pass())
        return self._running[-1]

    def end(self, ended: _Pass) -> None:
        if ended in self._running:
            self._running.remove(ended)
            self._last = ended

    def forget(self) -> None:
        for each_pass in (*self._running, self._last):
            each_pass.num_delivered = 0


class _CountedBatches:
    """Counts the batches of one loop; holds the only strong reference to the thread's owner."""

    def __init__(self, batches: BackgroundGenerator, passes: _Passes) -> None:
        self._batches, self._pass = batches, passes.begin()
        self._end = weakref.finalize(self, passes.end, self._pass)

    def __iter__(self) -> "_CountedBatches":
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except BaseException:
            self._end()
            raise
        self._pass.num_delivered += 1
        return batch

    def close(self) -> None:
        """End the thread and free what it fetched."""
        self._end()
        self._batches.close()
