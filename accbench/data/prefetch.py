"""Prefetching: fetch batches, and move them to the device, while the step before computes."""

import contextlib
import dataclasses
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from accbench.data import moving, nested

# Batches that an engine keeps ready: copying one while another waits is enough to hide the copy,
# and each takes device memory.
ON_DEVICE = 2

# How long closing waits for a thread that is stuck in its generator. The thread ends as soon as the
# generator yields an item.
_CLOSE_TIMEOUT_S = 5.0


class BackgroundGenerator:
    """An iterator over a generator's items, which a thread fetches ahead.

    An exception in the thread reaches the consumer. `close`, the end of a `with` block, or deleting
    the object ends the thread and frees what it held.

    Args:
        generator: any iterable; only the thread iterates it.
        local_rank: number of the CUDA device if `device` has none.
        max_prefetch: the most items ahead of the consumer, including the one being fetched.
        device: where the tensors of items go, on CUDA in a separate stream. None leaves them where
            they are.
        to_device: moves one item, instead of `move`.
    """

    def __init__(
        self,
        generator: Iterable[Any],
        local_rank: int,
        max_prefetch: int = 6,
        *,
        device: torch.device | str | None = None,
        to_device: Callable[[Any], Any] | None = None,
    ) -> None:
        if max_prefetch < 1:
            raise ValueError(f"max_prefetch must be at least 1, not {max_prefetch}")
        device = None if device is None else torch.device(device)
        if device is not None and device.type == "cuda" and device.index is None:
            device = torch.device("cuda", local_rank)
        if to_device is None:
            to_device = _identity if device is None else _Mover(device)
        on_cuda = device is not None and device.type == "cuda"
        self._shared = _Shared(max_prefetch)
        self._consumer_device = device if on_cuda else None
        transfer = _StreamCopier(to_device, device) if device is not None and on_cuda else to_device
        # The thread has no reference to this object, which can thus be garbage-collected.
        self._thread = threading.Thread(
            target=_work,
            args=(self._shared, generator, transfer, self._consumer_device),
            name="prefetch",
            daemon=True,
        )
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._shared, self._thread)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._shared.stopped.is_set():
            raise StopIteration
        item, error = self._shared.ready.get()
        self._shared.free.release()
        if error is not None:
            self.close()
            try:
                raise error
            finally:
                # Otherwise the error and this frame, with its callers, would be a reference cycle.
                del error
        if self._consumer_device is not None:
            item = _wait_on_consumer_stream(item, self._consumer_device)
        return item

    @property
    def is_fetching(self) -> bool:
        """Whether the thread is still iterating over the generator."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End the thread and free what it fetched."""
        self._end()

    def __enter__(self) -> "BackgroundGenerator":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Shared:
    """The state that the thread and its consumer share."""

    def __init__(self, max_prefetch: int) -> None:
        self.ready: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self.free = threading.Semaphore(max_prefetch)
        self.stopped = threading.Event()


def _work(
    shared: _Shared,
    generator: Iterable[Any],
    transfer: Callable[[Any], Any],
    cuda_device: torch.device | None,
) -> None:
    try:
        if cuda_device is not None:
            # A new thread uses device 0, where pinning would take memory for every rank.
            torch.cuda.set_device(cuda_device)
        iterator = iter(generator)
        del generator
        while True:
            shared.free.acquire()  # before fetching: the item being fetched counts too
            if shared.stopped.is_set():
                break
            try:
                item = transfer(next(iterator))
            except StopIteration as error:
                shared.ready.put((None, error))
                return
            shared.ready.put((item, None))
            del item
        if hasattr(iterator, "close"):
            iterator.close()
    except BaseException as error:  # the consumer raises it
        shared.ready.put((None, error))


def _end(shared: _Shared, thread: threading.Thread) -> None:
    shared.stopped.set()
    shared.free.release()
    if thread is not threading.current_thread():
        thread.join(_CLOSE_TIMEOUT_S)
    with contextlib.suppress(queue.Empty):
        while True:
            shared.ready.get_nowait()
    # For a consumer in another thread that is still waiting.
    shared.ready.put((None, StopIteration()))


def _identity(item: Any) -> Any:
    return item


@dataclasses.dataclass(frozen=True)
class _Mover:
    device: torch.device

    def __call__(self, item: Any) -> Any:
        return move(item, self.device)


@dataclasses.dataclass(frozen=True)
class _StreamCopier:
    """Copies on its own CUDA stream; returns (the copy, the event of its end)."""

    to_device: Callable[[Any], Any]
    device: torch.device
    stream: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stream", torch.cuda.Stream(self.device))

    def __call__(self, item: Any) -> tuple[Any, Any]:
        with torch.cuda.stream(self.stream):
            return self.to_device(item), self.stream.record_event()


def _wait_on_consumer_stream(copied: tuple[Any, Any], device: torch.device) -> Any:
    item, event = copied
    consumer = torch.cuda.current_stream(device)
    consumer.wait_event(event)
    for tensor in nested.tensors_of(item):
        if tensor.is_cuda:
            # Otherwise the allocator would reuse the memory while the consumer still reads it.
            tensor.record_stream(consumer)
    return item


def move(item: Any, device: torch.device) -> Any:
    """Return the same nest with its tensors on the device; see `accbench.data.moving`."""
    return moving.moved(item, device)
