"""Lines and modules of a model's own code, for messages that a person acts on."""

import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from torch import nn

_ACCBENCH = str(Path(__file__).parents[2]) + os.sep


@cache
def _excluded_prefixes() -> tuple[str, ...]:
    """Return path prefixes of torch, of the engines, and of code without a file."""
    specs = (importlib.util.find_spec(name) for name in ("torch", "torch_xla"))
    folders = [os.path.dirname(spec.origin) + os.sep for spec in specs if spec and spec.origin]
    return (*folders, f"{_ACCBENCH}engines{os.sep}", "<")


@cache
def _is_standard_library(path: str) -> bool:
    """Return whether a file is one of Python's own, such as contextlib, through which calls go."""
    folder = sysconfig.get_path("stdlib") + os.sep
    packages = tuple(f"{folder}{name}-packages{os.sep}" for name in ("site", "dist"))
    return path.startswith(folder) and not path.startswith(packages)


def find_model_line(frames: Iterable[traceback.FrameSummary]) -> str | None:
    """Return a stack's innermost line in the model, `FILE:LINE: code`; None if there is none."""
    for frame in reversed([*frames]):
        if frame.filename.startswith(f"{_ACCBENCH}training{os.sep}"):
            return None  # further out is who called the training loop
        path = frame.filename
        if not (path.startswith(_excluded_prefixes()) or _is_standard_library(path)):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return None


def running_module_class() -> str | None:
    """Return the class name of the innermost module in its forward pass in this thread."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(module, nn.Module):
            return type(module).__name__
        frame = frame.f_back  # type: ignore[assignment]
    return None
