"""What a model raises by itself, whatever compiles it: no compiler is to blame for that."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from accbench.engines.common import python_state


def of_call(model: nn.Module, call: Callable[[], Any]) -> Exception | None:
    """Return what plain torch raises in `call`, whose traceback has the model's line; else None.

    Buffers, the model's attributes and random numbers are as before.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with python_state.restored(model):
        try:
            with torch.random.fork_rng(devices=()):
                call()
        except Exception as error:
            return error
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    if buffer.shape == before.shape:
                        buffer.copy_(before)
    return None


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Keep torch from printing the stack of an error in shapes before it is raised."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
