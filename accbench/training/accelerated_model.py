"""A user's model, run by an engine wherever it is called, and else what it was."""

from typing import Any

import torch
from torch import nn

from accbench.data import nested
from accbench.engines.loops import LoopEngine


def accelerate(model: nn.Module, prepared: nn.Module, engine: LoopEngine) -> None:
    """Have `model(...)` run `prepared(...)` under the engine's autocast; results are float32.

    The object stays, of a subclass of its class: attributes, methods and names of parameters are
    as they were, which those of a wrapper would not be. A copy of it is an ordinary model.

    Args:
        prepared: what `engine.prepare(model)` gave.
    """
    kind: Any = type(model)
    running = False

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal running
        if running:  # by what was prepared, or by a method of the model's
            return kind.__call__(self, *args, **kwargs)
        running = True
        try:
            with engine.calling(prepared):
                outputs = prepared(*args, **kwargs)
        finally:
            running = False
        outputs = engine.results(outputs)
        if engine.precision.autocast_dtype is None:
            return outputs
        return nested.mapped(outputs, _as_float32, doing="made float32")

    def reduce(self: Any, protocol: Any) -> Any:
        _, _, *state = kind.__reduce_ex__(self, protocol)
        return _new, (kind,), *state

    members = {"__call__": call, "__reduce_ex__": reduce, "__module__": kind.__module__}
    accelerated = type(kind.__name__, (kind,), {**members, "__doc__": kind.__doc__})
    # Not by the class's own `__setattr__`: a traced module hands it on to what it is made of.
    object.__setattr__(model, "__class__", accelerated)


def _new(kind: Any) -> Any:
    return kind.__new__(kind)


def _as_float32(output: Any) -> Any:
    if output.dtype in (torch.float16, torch.bfloat16):
        return output.float()
    return output
