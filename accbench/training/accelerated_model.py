"""A user's model that an engine runs wherever it is called."""

from typing import Any

import torch
from torch import nn

from accbench.data import nested
from accbench.engines.loops import LoopEngine


def accelerate(model: nn.Module, prepared: nn.Module, engine: LoopEngine) -> None:
    """Make `model(...)` run `prepared(...)` under the engine's autocast; results are float32.

    The object stays the same, of a subclass of its class: attributes, methods and parameter names
    do not change, as they would with a wrapper. A copy of it is an ordinary model.

    Args:
        model: the user's model; changed in place.
        prepared: what `engine.prepare(model)` returned.
        engine: the engine that prepared it.
    """
    kind: Any = type(model)
    running = False

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal running
        if running:  # called by `prepared`, or by a method of the model's
            return kind.__call__(self, *args, **kwargs)
        running = True
        try:
            with engine.calling(prepared):
                outputs = prepared(*args, **kwargs)
        finally:
            running = False
        outputs = engine.output_for_loop(outputs)
        if engine.precision.autocast_dtype is None:
            return outputs
        return nested.mapped(outputs, _as_float32, doing="made float32")

    def reduce(self: Any, protocol: Any) -> Any:
        _, _, *state = kind.__reduce_ex__(self, protocol)
        return _new_instance, (kind,), *state

    members = {"__call__": call, "__reduce_ex__": reduce, "__module__": kind.__module__}
    accelerated = type(kind.__name__, (kind,), {**members, "__doc__": kind.__doc__})
    # Not by the class's own `__setattr__`: a traced module passes it on to its parts.
    object.__setattr__(model, "__class__", accelerated)


def _new_instance(kind: Any) -> Any:
    return kind.__new__(kind)


def _as_float32(output: Any) -> Any:
    if output.dtype in (torch.float16, torch.bfloat16):
        return output.float()
    return output
