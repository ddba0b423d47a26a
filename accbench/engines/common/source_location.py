"""Places in a model's own code, for messages that a person is to act on."""

import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from torch import nn

_ACCBENCH = str(Path(__file__).parents[2]) + os.sep


@cache
def _not_the_model() -> tuple[str, ...]:
    """Folders of torch and of the engines; and code without a file."""
    specs = (importlib.util.find_spec(name) for name in ("torch", "torch_xla"))
    folders = [os.path.dirname(spec.origin) + os.sep for spec in specs if spec and spec.origin]
    return (*folders, f"{_ACCBENCH}engines{os.sep}", "<")


def in_model(frames: Iterable[traceback.FrameSummary]) -> str | None:
    """Where in the model a stack stands, `FILE:LINE: code`; None if it is nowhere in one."""
    for frame in reversed([*frames]):
        if frame.filename.startswith(f"{_ACCBENCH}training{os.sep}"):
            return None  # further out is who called the training loop
        if not frame.filename.startswith(_not_the_model()):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return None


def running_module() -> str | None:
    """The class of the innermost module that is in its forward pass in this thread."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(module, nn.Module):
            return type(module).__name__
        frame = frame.f_back  # type: ignore[assignment]
    return None
