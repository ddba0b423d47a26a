"""Which input of a step changed its shape, as a compiler recompiles for each set of shapes."""

from typing import Any

from accbench.data import nested

_MAX_CHANGES = 5

Signature = tuple[tuple[str, tuple[int, ...], Any], ...]


class ShapeWatch:
    """A record of the sets of shapes that batches had."""

    def __init__(self) -> None:
        self._seen: set[Signature] = set()
        self._last: Signature | None = None
        self.changes: list[str] = []
        """`batch['tokens'] was (8, 128) and is (8, 96)`, the first few."""

    @property
    def num_seen(self) -> int:
        """Number of different sets of shapes."""
        return len(self._seen)

    def note(self, batch: Any) -> None:
        """Note a batch's shapes before its step."""
        signature = nested.signature(batch)
        last, self._last = self._last, signature
        if signature in self._seen:
            return
        self._seen.add(signature)
        if last is not None and len(self.changes) < _MAX_CHANGES:
            self.changes.append(_difference(last, signature))

    def causes(self) -> str:
        """Describe the causes of recompilations, for a message."""
        if not self.changes:
            return (
                "no input changed its shape: a number that Python computes does, such as a "
                "tensor's value or a count of steps, or a module's mode"
            )
        return f"{self.num_seen} sets of shapes: {'; '.join(self.changes)}"


def _difference(before: Signature, after: Signature) -> str:
    old = {name: (shape, dtype) for name, shape, dtype in before}
    lines = []
    for name, shape, dtype in after:
        if name not in old:
            lines.append(f"{name} of shape {shape} is new")
        elif old[name] != (shape, dtype):
            types = "" if old[name][1] == dtype else f" ({old[name][1]}, then {dtype})"
            lines.append(f"{name} was {old[name][0]} and is {shape}{types}")
    missing = old.keys() - {name for name, _, _ in after}
    lines += [f"{name} is missing" for name in sorted(missing)]
    return ", ".join(lines)
