"""Indices of a loop's batches, looked at on the host before XLA computes with them.

The operations of the first step on a batch of some shapes are noted as they are called, and once
more every hundredth step; of the others only the batch is looked at.
"""

import weakref
from typing import Any

import torch
from torch.overrides import _get_current_function_mode, _pop_mode

from accbench.data import nested
from accbench.engines.common.index_ranges import Ranges, Tracer

_TRACED_EVERY = 100


class HostCopies:
    """What tensors on the device were on the host, as long as they live there."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Any, torch.Tensor]] = {}

    def note(self, sent: torch.Tensor, on_host: torch.Tensor) -> None:
        """Note a tensor that was sent."""
        key = id(sent)
        self._of[key] = (weakref.ref(sent, lambda _: self._of.pop(key, None)), on_host)

    def get(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return what was sent."""
        found = self._of.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None


class IndexWatch:
    """Notes what a loop does with a batch, and refuses indices that are out of range."""

    def __init__(self) -> None:
        self.host_copies = HostCopies()
        self._ranges: dict[Any, list[Ranges]] = {}
        self._num_seen: dict[Any, int] = {}
        self._tracer: Tracer | None = None
        self._left: list[Tracer] = []
        self._key: Any = None
        self._inputs: tuple[list[torch.Tensor], list[str]] = ([], [])

    def begin(self, batch: Any, is_fixed: bool) -> None:
        """Look at a batch on the device before the loop has it.

        Args:
            is_fixed: each step on such a batch does the same, as accbench's own does.

        Raises:
            RequestError: an index of this batch, or of the one before, is out of range.
        """
        self.end()
        named = [
            (name, tensor, host) for name, tensor in nested.named_tensors(batch)
            if (host := self.host_copies.get(tensor)) is not None
        ]  # fmt: skip
        self._inputs = [host for _, _, host in named], [name for name, _, _ in named]
        self._key = nested.signature(batch), torch.is_grad_enabled()
        self._num_seen[self._key] = self._num_seen.get(self._key, 0) + 1
        known = self._ranges.get(self._key)
        is_due = known is None or self._num_seen[self._key] % _TRACED_EVERY == 0
        for ranges in known or ():
            if is_fixed:
                ranges.refuse(*self._inputs)
            else:  # the loop may do something else this time, which is looked at then
                is_due = is_due or ranges.problem(*self._inputs) is not None
        if is_due:
            self._tracer = Tracer(tensor for _, tensor, _ in named)
            self._tracer.__enter__()

    def look(self) -> None:
        """Raise RequestError if an index that was taken so far is out of range."""
        if self._tracer is not None:
            self._tracer.notes.ranges().refuse(*self._inputs)

    def end(self) -> None:
        """Likewise, with the step done."""
        tracer = self._stop()
        if tracer is None:
            return
        ranges = tracer.notes.ranges()
        known = self._ranges.setdefault(self._key, [])
        if ranges not in known:
            known.append(ranges)
            del known[:-2]
        ranges.refuse(*self._inputs)

    def leave(self) -> None:
        """End without looking, where the loop was left."""
        self._stop()

    def _stop(self) -> Tracer | None:
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            tracer.is_on = False
            self._left.append(tracer)
        # A mode that the loop has entered since, a default device for one, is to be left first.
        while self._left and _get_current_function_mode() is self._left[-1]:
            self._left.pop()
            _pop_mode()
        return tracer
