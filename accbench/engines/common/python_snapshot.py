"""A model's attributes and Python's random numbers as they were, to undo what a pass changes."""

import contextlib
import random
from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any

import numpy as np
from torch import nn

from accbench.engines.common.python_state import (
    GENERATORS,
    MAX_DEPTH,
    MODULE_ATTRIBUTES,
    Freezer,
    is_plain,
    parts_of,
)


class PythonSnapshot:
    """A snapshot of a model's attributes and buffer slots, and of Python's random numbers.

    It does not hold the values of tensors.

    Args:
        model: the generators of random numbers among its attributes count, too.
        generators: others.
    """

    def __init__(self, model: nn.Module, generators: Iterable[Any] = ()) -> None:
        self._contents: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        self._generators = [(each, _generator_state(each)) for each in generators]
        for module in model.modules():
            attributes = vars(module)
            self._contents.append((attributes, dict(attributes)))
            self._contents.append((module._buffers, dict(module._buffers)))
            for key, value in attributes.items():
                if key not in MODULE_ATTRIBUTES:
                    self._note(value, 0)
        self._random = random.getstate(), np.random.get_state()

    def _note(self, value: Any, depth: int) -> None:
        if isinstance(value, GENERATORS):
            self._generators.append((value, _generator_state(value)))
        inner = parts_of(value)
        if inner is None or id(inner) in self._seen or depth == MAX_DEPTH:
            return
        self._seen.add(id(inner))
        if not isinstance(inner, (tuple, frozenset)):
            self._contents.append((inner, inner.copy()))
        for item in inner.values() if isinstance(inner, dict) else inner:
            self._note(item, depth + 1)

    def restore(self) -> None:
        """Undo what forward passes have changed."""
        for value, copy in self._contents:
            value.clear()
            (value.update if hasattr(value, "update") else value.extend)(copy)
        self._restore_generators()

    def keep_plain(self) -> None:
        """Undo what forward passes have changed, except numbers, strings and nests of these.

        Tensors that a forward pass leaves belong to its tracing, and to no one else.
        """
        for value, copy in self._contents:
            frozen = Freezer()
            if isinstance(value, dict):
                for key in {**copy, **value}:
                    new, old = value.get(key, copy), copy.get(key, value)
                    if new is old or (new is not copy and is_plain(frozen.freeze(new))):
                        continue
                    if old is value:
                        del value[key]
                    else:
                        value[key] = old
            elif not is_plain(frozen.freeze(value)):
                value.clear()
                (value.update if hasattr(value, "update") else value.extend)(copy)
        self._restore_generators()

    def _restore_generators(self) -> None:
        random.setstate(self._random[0])
        np.random.set_state(self._random[1])
        for generator, state in self._generators:
            _set_generator_state(generator, state)

    def draws_random_numbers(self) -> bool:
        """Return whether Python's or numpy's random numbers were drawn since."""
        (python, numpy), now = self._random, np.random.get_state()
        if any(repr(_generator_state(each)) != repr(state) for each, state in self._generators):
            return True
        return random.getstate() != python or not all(
            np.array_equal(before, after) for before, after in zip(numpy, now, strict=True)
        )


def _generator_state(generator: Any) -> Any:
    """Return a copy of a generator's state; None if it has none, such as the system's."""
    if isinstance(generator, random.Random):
        return None if isinstance(generator, random.SystemRandom) else generator.getstate()
    if isinstance(generator, np.random.Generator):
        return deepcopy(generator.bit_generator.state)
    return generator.get_state()


def _set_generator_state(generator: Any, state: Any) -> None:
    if state is None:
        return
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[PythonSnapshot]:
    """Undo at the end what forward passes in the block change of a model's attributes."""
    saved = PythonSnapshot(model)
    try:
        yield saved
    finally:
        saved.restore()
