"""Go on in the environment of an engine whose packages this one lacks."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from accbench.system import extras


def restart_early(argv: Sequence[str]) -> None:
    """Start this process's command again where engine xla's packages are, before torch is imported.

    Only `--engine`, `--engines` and `--compiler-opt` on the command line are read. What else can
    name the engine is left to `resolving.restart_for`, which knows all flags, and imports torch.

    Args:
        argv: the command's arguments.
    """
    if not {"-h", "--help"} & {*argv} and "xla" in _named_engines(argv):
        restart("xla", extras.python_with_torch_xla(), argv)


def restart(engine: str, python: Path | None, argv: Sequence[str]) -> None:
    """Start this process's command again with another Python, and say so.

    Nothing happens unless the process's own command line ends in `argv`: in a notebook, or in a
    process that serves several requests.

    Args:
        engine: the engine that asks for it.
        python: the other Python; None does nothing.
        argv: the command's arguments.
    """
    if python is None or sys.orig_argv[-len(argv) :] != [*argv]:
        return
    notice = f"engine {engine} has an environment of its own: continuing with {python}"
    print(notice, file=sys.stderr, flush=True)
    os.execv(python, [str(python), *sys.orig_argv[1:]])


def _named_engines(argv: Sequence[str]) -> set[str]:
    names: set[str] = set()
    for index, argument in enumerate(argv):
        flag, has_value, value = argument.partition("=")
        if flag in ("--engine", "--engines"):
            value = value if has_value else "".join(argv[index + 1 : index + 2])
            names |= {spec.split(":")[0].strip() for spec in value.split(",")}
        elif flag in ("--compiler-opt", "--compiler_opt"):
            names.add("xla")
    return names
