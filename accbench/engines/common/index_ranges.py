"""Range checks of the integers in a step's inputs that embeddings, losses and others index by.

torch raises where an index is out of range. A compiled step cannot: XLA reads whatever lies there,
JAX takes the nearest, and both train on (pytorch/xla#4552). So while a step is traced, each
operation on integers that come from its inputs is logged, and each that takes such integers as
indices. The few operations that indices come from, a slice, a shift, a mask, are then computed on
the host for every batch, and the results are checked.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from accbench.engines.common import index_arguments
from accbench.engines.common.index_arguments import IndexBounds
from accbench.errors import RequestError


@dataclasses.dataclass(frozen=True)
class _Placeholder:
    """Placeholder in an operation's arguments for a tensor: an input, or an earlier result."""

    number: int


@dataclasses.dataclass(frozen=True)
class _Operation:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int | None, ...]
    """Number of its result, or of the parts of a tuple; None for what is no tensor."""
    returns_tuple: bool
    writes: int | None
    """Number of the value that it writes to in place."""

    @property
    def reads(self) -> set[int]:
        """The numbers of the values that it reads."""
        return {placeholder.number for placeholder in _leaves((self.args, self.kwargs))}

    def compute(self, values: dict[int, torch.Tensor]) -> None:
        """Compute the results, and add them to `values`."""
        args, kwargs = _with_values((self.args, self.kwargs), values)
        result = self.function(*args, **kwargs)
        parts = result if self.returns_tuple else (result,)
        for number, part in zip(self.results, parts, strict=True):
            if number is not None and number != self.writes:
                values[number] = part


@dataclasses.dataclass(frozen=True)
class _Check:
    number: int
    bounds: IndexBounds
    of_input: int | None
    """The input that the indices come from; None if the model makes them itself."""


@dataclasses.dataclass(frozen=True)
class IndexRanges:
    """The index checks of a traced step, and the operations that lead to them."""

    steps: tuple[_Operation | _Check, ...] = ()
    """In the order of the calls, for some write to what others read."""

    @property
    def checks(self) -> list[_Check]:
        """The checks, without the operations."""
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
        """Return a line on indices that are out of range; None if all are in range.

        Args:
            inputs: on the host, of the shapes that the step was traced with; only read.
            names: of the inputs, for the line.
        """
        values = {n: t.clone() if _writes_in_place(self.steps) else t for n, t in enumerate(inputs)}
        with torch.no_grad(), contextlib.suppress(Exception):  # an operation may need the device
            for step in self.steps:
                if isinstance(step, _Operation):
                    step.compute(values)
                    continue
                problem = step.bounds.problem(values[step.number])
                if problem is not None:
                    return f"{_indices_name(step, names)} {problem}"
        return None


class IndexLog:
    """Log of the operations that compute integers from a step's inputs alone."""

    def __init__(self, inputs: Iterable[torch.Tensor]) -> None:
        self._numbers: dict[int, tuple[Any, int]] = {}
        self._steps: list[_Operation | tuple[int, IndexBounds]] = []
        self._number = self._num_inputs = 0
        for tensor in inputs:
            self._add_value(tensor)
        self._num_inputs = self._number

    def record(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        """Log a call: its arguments and its result, tensors on any device or fake ones."""
        name = getattr(function, "__name__", "")
        for index, bounds in index_arguments.find_in_call(name, args, kwargs):
            number = self._number_of(index)
            if number is not None:
                self._steps.append((number, bounds))
        if kwargs.get("out") is not None:
            self._numbers.clear()
            return
        tensors = [*_tensors((args, kwargs))]
        numbers = [self._number_of(tensor) for tensor in tensors]
        all_known = all(number is not None for number in numbers)
        written = numbers[0] if numbers and index_arguments.writes(name) else None
        if not all_known or not (tensors or index_arguments.creates_from_numbers(name)):
            if written is not None:
                self._numbers.clear()  # it and its views may hold anything now
            return
        if index_arguments.draws_random_numbers(name) or not _is_integral(out, written):
            return
        self._append(function, args, kwargs, out, written)

    def _append(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any,
        written: int | None,
    ) -> None:  # fmt: skip
        function, args, kwargs = index_arguments.to_host(function, args, kwargs)
        logged_args, logged_kwargs = _with_placeholders((args, kwargs), self._number_of)
        returns_tuple = isinstance(out, (tuple, list))
        parts = out if returns_tuple else (out,)
        results = tuple(
            written if written is not None else self._add_value(part)
            if isinstance(part, torch.Tensor) else None
            for part in parts
        )  # fmt: skip
        self._steps.append(
            _Operation(function, logged_args, logged_kwargs, results, returns_tuple, written)
        )

    def ranges(self) -> IndexRanges:
        """Return the log's checks, with only the operations that indices come from."""
        origins, needed = self._origins(), set[int]()
        steps: list[_Operation | _Check] = []
        for step in reversed(self._steps):
            if not isinstance(step, _Operation):
                number, bounds = step
                steps.append(_Check(number, bounds, self._input_of(number)))
                needed.add(origins[number])
            elif {origins[n] for n in step.results if n is not None} & needed:
                needed |= {origins[n] for n in step.reads}
                steps.append(step)
        return IndexRanges(_without_repeats(steps[::-1]))

    @property
    def _operations(self) -> list[_Operation]:
        return [step for step in self._steps if isinstance(step, _Operation)]

    def _origins(self) -> dict[int, int]:
        """Return for each value the one whose memory it may be a view of."""
        origins = {number: number for number in range(self._num_inputs)}
        for operation in self._operations:
            first = next(iter(_leaves((operation.args, operation.kwargs))), None)
            for number in operation.results:
                if number is not None and number not in origins:
                    origins[number] = number if first is None else origins[first.number]
        return origins

    def _input_of(self, number: int) -> int | None:
        wanted, inputs = {number}, set[int]()
        for operation in reversed(self._operations):
            if wanted & {n for n in operation.results if n is not None}:
                wanted |= operation.reads
        inputs = {number for number in wanted if number < self._num_inputs}
        return min(inputs, default=None)

    def _add_value(self, tensor: torch.Tensor) -> int:
        number = self._number
        self._number += 1
        # Weak references: a temporary kept alive would become a result of XLA's graph.
        self._numbers[id(tensor)] = (weakref.ref(tensor), number)
        return number

    def _number_of(self, tensor: Any) -> int | None:
        entry = self._numbers.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None


class IndexTracer(TorchFunctionMode):
    """Function mode that logs the calls in its block."""

    def __init__(self, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.log = IndexLog(inputs)
        self.is_on = True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.is_on:
            self.log.record(func, args, kwargs or {}, out)
        return out


def ranges_of_graph(graph: torch.fx.GraphModule, inputs: Sequence[int]) -> IndexRanges:
    """Return the index checks of a graph that dynamo has captured, for calls of torch's own.

    Args:
        graph: with torch functions and methods.
        inputs: which of its inputs may hold indices.
    """
    nodes = list(graph.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    values = {node: node.meta.get("example_value") for node in nodes}
    notes = IndexLog(values[placeholders[index]] for index in inputs)
    for node in nodes:
        function = node.target
        if node.op == "call_method":
            function = getattr(torch.Tensor, node.target, None)
        elif node.op != "call_function":
            continue
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        notes.record(function, tuple(args), dict(kwargs), values[node])
    return notes.ranges()


def _writes_in_place(steps: Iterable[_Operation | _Check]) -> bool:
    return any(isinstance(step, _Operation) and step.writes is not None for step in steps)


def _without_repeats(steps: list[_Operation | _Check]) -> tuple[_Operation | _Check, ...]:
    """Leave out repeated checks, unless an operation writes in place in between."""
    seen = set[_Check]()
    writes_in_place = _writes_in_place(steps)
    unique: list[_Operation | _Check] = []
    for step in steps:
        if isinstance(step, _Check):
            if step in seen and not writes_in_place:
                continue
            seen.add(step)
        unique.append(step)
    return tuple(unique)


def _indices_name(check: _Check, names: Sequence[str]) -> str:
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


def _leaves(nest: Any) -> Iterable[_Placeholder]:
    if isinstance(nest, _Placeholder):
        yield nest
    elif isinstance(nest, (tuple, list)):
        for part in nest:
            yield from _leaves(part)
    elif isinstance(nest, dict):
        yield from _leaves(list(nest.values()))


def _with_placeholders(nest: Any, number_of: Callable[[Any], int | None]) -> Any:
    if isinstance(nest, torch.Tensor):
        number = number_of(nest)
        assert number is not None
        return _Placeholder(number)
    return _map_parts(nest, lambda part: _with_placeholders(part, number_of))


def _with_values(nest: Any, values: dict[int, torch.Tensor]) -> Any:
    if isinstance(nest, _Placeholder):
        return values[nest.number]
    return _map_parts(nest, lambda part: _with_values(part, values))


def _map_parts(nest: Any, change: Callable[[Any], Any]) -> Any:
    if type(nest) in (tuple, list):
        return type(nest)(change(part) for part in nest)
    if type(nest) is dict:
        return {key: change(part) for key, part in nest.items()}
    return nest
