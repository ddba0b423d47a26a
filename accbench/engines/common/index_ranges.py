"""Which numbers of a step's inputs are indices, and of how many things: an embedding's, a loss's.

torch raises where an index is out of range. A compiled step cannot: XLA reads whatever lies there,
JAX takes the nearest, and both train on (pytorch/xla#4552). So while a step is traced, each
operation on integers that come from its inputs is noted, and each that takes such integers for
indices. The few operations that indices come from, a slice, a shift, a mask, are then computed on
the host for every batch, and what comes out is looked at.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from accbench.engines.common import index_arguments
from accbench.engines.common.index_arguments import Taken
from accbench.errors import RequestError


@dataclasses.dataclass(frozen=True)
class _Place:
    """Stands in an operation's arguments for a tensor: an input, or an earlier result."""

    number: int


@dataclasses.dataclass(frozen=True)
class _Operation:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int | None, ...]
    """Where its result goes, or the parts of one that is a tuple."""
    is_several: bool
    writes: int | None
    """The place that it writes to."""

    @property
    def reads(self) -> set[int]:
        """The places that it takes."""
        return {place.number for place in _leaves((self.args, self.kwargs))}

    def compute(self, values: dict[int, torch.Tensor]) -> None:
        """Put its results beside the values that there are."""
        args, kwargs = _replaced((self.args, self.kwargs), values)
        result = self.function(*args, **kwargs)
        parts = result if self.is_several else (result,)
        for place, part in zip(self.results, parts, strict=True):
            if place is not None and place != self.writes:
                values[place] = part


@dataclasses.dataclass(frozen=True)
class _Check:
    place: int
    taken: Taken
    of_input: int | None
    """The input that the indices come from; None of numbers that the model makes itself."""


@dataclasses.dataclass(frozen=True)
class Ranges:
    """What must hold of the inputs of a step that was traced."""

    steps: tuple[_Operation | _Check, ...] = ()
    """In the order of the calls, for some write to what others take."""

    @property
    def checks(self) -> list[_Check]:
        """Return what is looked at."""
        return [step for step in self.steps if isinstance(step, _Check)]

    def refuse(self, inputs: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Raise RequestError if an index is out of range; see `problem`."""
        problem = self.problem(inputs, names)
        if problem is not None:
            raise RequestError(
                f"{problem}: mend the data, or give the model room for it; torch on the host "
                "raises IndexError, and a compiled step would train on whatever lies there"
            )

    def problem(self, inputs: Sequence[torch.Tensor], names: Sequence[str]) -> str | None:
        """Return a line on indices that are out of range; None if all are in it.

        Args:
            inputs: on the host, of the shapes that the step was traced with; only read.
            names: of the inputs, for the line.
        """
        values = {n: t.clone() if _writes(self.steps) else t for n, t in enumerate(inputs)}
        with torch.no_grad(), contextlib.suppress(Exception):  # of what only the device can do
            for step in self.steps:
                if isinstance(step, _Operation):
                    step.compute(values)
                    continue
                problem = step.taken.problem(values[step.place])
                if problem is not None:
                    return f"{_name(step, names)} {problem}"
        return None


class Notes:
    """Operations as they are called, as far as they compute integers from the inputs alone."""

    def __init__(self, inputs: Iterable[torch.Tensor]) -> None:
        self._places: dict[int, tuple[Any, int]] = {}
        self._steps: list[_Operation | tuple[int, Taken]] = []
        self._number = self._num_inputs = 0
        for tensor in inputs:
            self._place(tensor)
        self._num_inputs = self._number

    def note(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Note a call: its arguments and what came out, tensors on any device or fake ones."""
        name = getattr(function, "__name__", "")
        for index, taken in index_arguments.of_call(name, args, kwargs):
            number = self._number_of(index)
            if number is not None:
                self._steps.append((number, taken))
        if kwargs.get("out") is not None:
            self._places.clear()
            return
        tensors = [*_tensors((args, kwargs))]
        numbers = [self._number_of(tensor) for tensor in tensors]
        known = all(number is not None for number in numbers)
        written = numbers[0] if numbers and index_arguments.writes(name) else None
        if not known or not (tensors or index_arguments.makes_integers(name)):
            if written is not None:
                self._places.clear()  # who knows what it and its views hold now
            return
        if index_arguments.draws(name) or not _is_integral(out, written):
            return
        self._append(function, args, kwargs, out, written)

    def _append(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any,
        written: int | None,
    ) -> None:  # fmt: skip
        function, args, kwargs = index_arguments.on_host(function, args, kwargs)
        noted_args, noted_kwargs = _with_places((args, kwargs), self._number_of)
        several = isinstance(out, (tuple, list))
        parts = out if several else (out,)
        results = tuple(
            written if written is not None else self._place(part)
            if isinstance(part, torch.Tensor) else None
            for part in parts
        )  # fmt: skip
        self._steps.append(
            _Operation(function, noted_args, noted_kwargs, results, several, written)
        )

    def ranges(self) -> Ranges:
        """Return what was noted, without what no index comes from."""
        origins, needed = self._origins(), set[int]()
        kept: list[_Operation | _Check] = []
        for step in reversed(self._steps):
            if not isinstance(step, _Operation):
                place, taken = step
                kept.append(_Check(place, taken, self._input_of(place)))
                needed.add(origins[place])
            elif {origins[n] for n in step.results if n is not None} & needed:
                needed |= {origins[n] for n in step.reads}
                kept.append(step)
        return Ranges(_once(kept[::-1]))

    @property
    def _operations(self) -> list[_Operation]:
        return [step for step in self._steps if isinstance(step, _Operation)]

    def _origins(self) -> dict[int, int]:
        """Place -> the one whose memory it may be a view of."""
        origins = {number: number for number in range(self._num_inputs)}
        for operation in self._operations:
            first = next(iter(_leaves((operation.args, operation.kwargs))), None)
            for number in operation.results:
                if number is not None and number not in origins:
                    origins[number] = number if first is None else origins[first.number]
        return origins

    def _input_of(self, place: int) -> int | None:
        waiting, seen = {place}, set[int]()
        for operation in reversed(self._operations):
            if waiting & {n for n in operation.results if n is not None}:
                waiting |= operation.reads
        seen = {number for number in waiting if number < self._num_inputs}
        return min(seen, default=None)

    def _place(self, tensor: torch.Tensor) -> int:
        number = self._number
        self._number += 1
        # Held weakly, or what is only passed by would be a result of XLA's graph.
        self._places[id(tensor)] = (weakref.ref(tensor), number)
        return number

    def _number_of(self, tensor: Any) -> int | None:
        found = self._places.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None


class Tracer(TorchFunctionMode):
    """Notes what is called inside of it."""

    def __init__(self, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.notes = Notes(inputs)
        self.is_on = True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.is_on:
            self.notes.note(func, args, kwargs or {}, out)
        return out


def of_graph(graph: torch.fx.GraphModule, inputs: Sequence[int]) -> Ranges:
    """Return what must hold of a graph's inputs, as dynamo has found it: of calls of torch's own.

    Args:
        inputs: which of its inputs may hold indices.
    """
    nodes = list(graph.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    values = {node: node.meta.get("example_value") for node in nodes}
    notes = Notes(values[placeholders[index]] for index in inputs)
    for node in nodes:
        function = node.target
        if node.op == "call_method":
            function = getattr(torch.Tensor, node.target, None)
        elif node.op != "call_function":
            continue
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        notes.note(function, tuple(args), dict(kwargs), values[node])
    return notes.ranges()


def _writes(steps: Iterable[_Operation | _Check]) -> bool:
    return any(isinstance(step, _Operation) and step.writes is not None for step in steps)


def _once(steps: list[_Operation | _Check]) -> tuple[_Operation | _Check, ...]:
    """Leave out checks that were there before, unless something is written to in between."""
    seen = set[_Check]()
    several = _writes(steps)
    kept: list[_Operation | _Check] = []
    for step in steps:
        if isinstance(step, _Check):
            if step in seen and not several:
                continue
            seen.add(step)
        kept.append(step)
    return tuple(kept)


def _name(check: _Check, names: Sequence[str]) -> str:
    return "what the model makes" if check.of_input is None else names[check.of_input]


def _is_integral(out: Any, written: int | None) -> bool:
    if out is None:
        return written is not None
    parts = [*_tensors(out if isinstance(out, (tuple, list)) else (out,))]
    return bool(parts) and not any(t.is_floating_point() or t.is_complex() for t in parts)


def _tensors(nest: Any) -> Iterable[torch.Tensor]:
    if isinstance(nest, torch.Tensor):
        yield nest
    elif isinstance(nest, (tuple, list)):
        for part in nest:
            yield from _tensors(part)
    elif isinstance(nest, dict):
        yield from _tensors(list(nest.values()))


def _leaves(nest: Any) -> Iterable[_Place]:
    if isinstance(nest, _Place):
        yield nest
    elif isinstance(nest, (tuple, list)):
        for part in nest:
            yield from _leaves(part)
    elif isinstance(nest, dict):
        yield from _leaves(list(nest.values()))


def _with_places(nest: Any, number_of: Callable[[Any], int | None]) -> Any:
    if isinstance(nest, torch.Tensor):
        number = number_of(nest)
        assert number is not None
        return _Place(number)
    return _rebuilt(nest, lambda part: _with_places(part, number_of))


def _replaced(nest: Any, values: dict[int, torch.Tensor]) -> Any:
    if isinstance(nest, _Place):
        return values[nest.number]
    return _rebuilt(nest, lambda part: _replaced(part, values))


def _rebuilt(nest: Any, change: Callable[[Any], Any]) -> Any:
    if type(nest) in (tuple, list):
        return type(nest)(change(part) for part in nest)
    if type(nest) is dict:
        return {key: change(part) for key, part in nest.items()}
    return nest
