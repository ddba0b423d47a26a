"""Batches fetched, and moved to the device, while the step before them computes."""

import contextlib
import dataclasses
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from accbench.data import moving, nested, shared_memory

# Batches that an engine keeps ready: one to copy while another waits is enough to
# hide the copy, and each costs memory of the device.
ON_DEVICE = 2

# How long closing waits for a thread that is stuck in its generator. It ends by
# itself as soon as the generator gives something.
_CLOSE_TIMEOUT_S = 5.0


class BackgroundGenerator:
    """The items of a generator, fetched ahead in a thread.

    An exception in the thread reaches the consumer. `close`, the end of a `with`
    block, or letting go of the object ends the thread and frees what it held.

    Args:
        generator: any iterable; the thread alone iterates it.
        local_rank: number of the CUDA device that `device` and `to_device` mean
            where they leave that open.
        max_prefetch: items that exist ahead of the consumer at most, the one in
            the making included.
        device: move items there: tensors in nests of any kind. On CUDA in a stream
            of its own. None leaves them where they are.
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
        transfer = _OnOwnStream(to_device, device) if device is not None and on_cuda else to_device
        # The thread knows nothing of this object, which can thus be collected.
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
        with shared_memory.explained():  # torch says in the main thread that a process is gone
            item, error = self._shared.ready.get()
        self._shared.free.release()
        if error is not None:
            self.close()
            try:
                raise error
            finally:
                del error  # or it and this frame, with all that called it, would hold each other
        if self._consumer_device is not None:
            item = _on_consumers_stream(item, self._consumer_device)
        return item

    @property
    def is_fetching(self) -> bool:
        """Whether the thread still iterates the generator."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End the thread and free what it fetched."""
        self._end()

    def __enter__(self) -> "BackgroundGenerator":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Shared:
    """What the thread and its consumer both hold."""

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
            # A thread begins on device 0, where pinning would take memory for every rank.
            torch.cuda.set_device(cuda_device)
        iterator = iter(generator)
        del generator
        while True:
            shared.free.acquire()  # before fetching: what is being made counts too
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
    except BaseException as error:  # handed over whole; the consumer raises it
        shared.ready.put((None, error))


def _end(shared: _Shared, thread: threading.Thread) -> None:
    shared.stopped.set()
    shared.free.release()
    if thread is not threading.current_thread():
        thread.join(_CLOSE_TIMEOUT_S)
    with contextlib.suppress(queue.Empty):
        while True:
            shared.ready.get_nowait()
    # For a consumer in another thread that waits still.
    shared.ready.put((None, StopIteration()))


def _identity(item: Any) -> Any:
    return item


@dataclasses.dataclass(frozen=True)
class _Mover:
    device: torch.device

    def __call__(self, item: Any) -> Any:
        return move(item, self.device)


@dataclasses.dataclass(frozen=True)
class _OnOwnStream:
    """Copies on a stream of its own; gives (what was copied, the event of its end)."""

    to_device: Callable[[Any], Any]
    device: torch.device
    stream: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stream", torch.cuda.Stream(self.device))

    def __call__(self, item: Any) -> tuple[Any, Any]:
        with torch.cuda.stream(self.stream):
            return self.to_device(item), self.stream.record_event()


def _on_consumers_stream(copied: tuple[Any, Any], device: torch.device) -> Any:
    item, event = copied
    consumer = torch.cuda.current_stream(device)
    consumer.wait_event(event)
    for tensor in nested.tensors_of(item):
        if tensor.is_cuda:
            # Or the allocator would reuse the memory while the consumer still reads it.
            tensor.record_stream(consumer)
    return item


def move(item: Any, device: torch.device) -> Any:
    """Return the same nest with its tensors on the device; see `accbench.data.moving`."""
    return moving.moved(item, device)
