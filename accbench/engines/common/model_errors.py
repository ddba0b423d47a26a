"""Errors that a model raises in plain torch, whichever compiler runs it."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from accbench.engines.common import python_snapshot


def error_of_call(model: nn.Module, call: Callable[[], Any]) -> Exception | None:
    """Return what plain torch raises in `call`, with the model's line in its traceback; else None.

    Buffers, the model's attributes and random numbers are restored.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with python_snapshot.restored(model):
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
    """Keep torch from logging the stack of a shape error before it is raised."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
