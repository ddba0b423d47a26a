"""Range checks of a batch's indices on the host, before XLA computes with them.

The operations of the first step on a batch of some shapes are traced as they are called, and again
every hundredth step; in other steps only the batch is checked.
"""

import weakref
from typing import Any

import torch
from torch.overrides import _get_current_function_mode, _pop_mode

from accbench.data import nested
from accbench.engines.common.index_ranges import IndexRanges, IndexTracer

_TRACED_EVERY = 100


class HostCopies:
    """The host tensors from which tensors on the device were sent, while the latter live."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Any, torch.Tensor]] = {}

    def note(self, sent: torch.Tensor, on_host: torch.Tensor) -> None:
        """Record which host tensor a device tensor was sent from."""
        key = id(sent)
        self._entries[key] = (weakref.ref(sent, lambda _: self._entries.pop(key, None)), on_host)

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the host tensor that a device tensor was sent from; None if unknown."""
        entry = self._entries.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None


class IndexWatch:
    """Traces what a loop does with a batch, and refuses indices that are out of range."""

    def __init__(self) -> None:
        self.host_copies = HostCopies()
        self._ranges: dict[Any, list[IndexRanges]] = {}
        self._num_seen: dict[Any, int] = {}
        self._tracer: IndexTracer | None = None
        self._modes_to_leave: list[IndexTracer] = []
        self._key: Any = None
        self._inputs: tuple[list[torch.Tensor], list[str]] = ([], [])

    def begin(self, batch: Any, is_fixed: bool) -> None:
        """Check a batch on the device before the loop gets it.

        Args:
            batch: nest of tensors; those that were sent through `host_copies` are checked.
            is_fixed: each step on such a batch does the same, as those of accbench's own loop do.

        Raises:
            RequestError: an index of this batch, or of the one before, is out of range.
        """
        self.end()
        watched = [
            (name, tensor, host) for name, tensor in nested.named_tensors(batch)
            if (host := self.host_copies.get(tensor)) is not None
        ]  # fmt: skip
        self._inputs = [host for _, _, host in watched], [name for name, _, _ in watched]
        self._key = nested.signature(batch), torch.is_grad_enabled()
        self._num_seen[self._key] = self._num_seen.get(self._key, 0) + 1
        known_ranges = self._ranges.get(self._key)
        is_due = known_ranges is None or self._num_seen[self._key] % _TRACED_EVERY == 0
        for ranges in known_ranges or ():
            if is_fixed:
                ranges.refuse(*self._inputs)
            else:  # the loop may do something else this time, which is traced then
                is_due = is_due or ranges.problem(*self._inputs) is not None
        if is_due:
            self._tracer = IndexTracer(tensor for _, tensor, _ in watched)
            self._tracer.__enter__()

    def check(self) -> None:
        """Raise RequestError if an index used so far is out of range."""
        if self._tracer is not None:
            self._tracer.log.ranges().refuse(*self._inputs)

    def end(self) -> None:
        """Raise RequestError if an index used in the step was out of range; ends its tracing."""
        tracer = self._stop()
        if tracer is None:
            return
        ranges = tracer.log.ranges()
        known_ranges = self._ranges.setdefault(self._key, [])
        if ranges not in known_ranges:
            known_ranges.append(ranges)
            del known_ranges[:-2]
        ranges.refuse(*self._inputs)

    def leave(self) -> None:
        """End the tracing without a check, where the loop was left."""
        self._stop()

    def _stop(self) -> IndexTracer | None:
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            tracer.is_on = False
            self._modes_to_leave.append(tracer)
        # Modes are a stack: one that the loop has entered since, such as a default device, must be
        # left first.
        while self._modes_to_leave and _get_current_function_mode() is self._modes_to_leave[-1]:
            self._modes_to_leave.pop()
            _pop_mode()
        return tracer
