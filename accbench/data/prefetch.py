"""Batches moved to the device while the step before them computes."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

Batch = tuple[torch.Tensor, ...]


def in_background(
    batches: Iterable[Batch], transfer: Callable[[Batch], Any], max_prefetch: int = 2
) -> Iterator[Any]:
    """`transfer` each batch in a thread, at most `max_prefetch` ahead of the consumer.

    An exception in the thread reaches the consumer. Closing the iterator, or
    leaving it to the collector, ends the thread and lets go of what it held.
    """
    ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(max_prefetch)
    stopped = threading.Event()

    def put(item: tuple[Any, BaseException | None]) -> bool:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for batch in batches:
                if not put((transfer(batch), None)):
                    return
            put((None, StopIteration()))
        except BaseException as error:  # handed over whole; the consumer raises it
            put((None, error))

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            batch, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield batch
    finally:
        stopped.set()
        thread.join()


def to_cuda(
    batches: Iterable[Batch], to_device: Callable[[Batch], Batch], device: torch.device
) -> Iterator[Batch]:
    """Copy on a stream of its own, from pinned memory, while the step before computes."""
    stream = torch.cuda.Stream(device)

    def transfer(batch: Batch) -> tuple[Batch, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            on_device = to_device(batch)
            return on_device, stream.record_event()

    for on_device, copied in in_background(batches, transfer):
        consumer = torch.cuda.current_stream(device)
        consumer.wait_event(copied)
        for tensor in on_device:
            # Or the allocator would reuse the memory while the consumer still reads it.
            tensor.record_stream(consumer)
        yield on_device
