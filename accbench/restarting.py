"""Go on in the environment of an engine whose packages this one lacks."""

import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from accbench.config import plugins
from accbench.system import extras


def restart_early(argv: Sequence[str]) -> None:
    """Start this process's command anew as `restart_for` does, before anything imports torch.

    Of what flags can say it reads `--engine`, `--engines` and `--compiler-opt` on the command line
    alone; `restart_for` comes later to all the rest.

    Args:
        argv: the command's arguments.
    """
    if not {"-h", "--help"} & {*argv} and "xla" in _named_engines(argv):
        is_here = importlib.util.find_spec("torch_xla") is not None
        _restart("xla", None if is_here else extras.xla_python(), argv)


def restart_for(engines: Iterable[str], argv: Sequence[str]) -> None:
    """Start this process's command anew in the environment of an engine whose packages lack here.

    A comparison runs as a whole in one environment, so that all its rows have the same torch.
    Nothing happens unless the process's own command line ends in `argv`: in a notebook, or in a
    process that serves several requests, the engine is refused instead.

    Args:
        engines: names of the engines that are asked for.
        argv: the arguments that ask for them.
    """
    for name in engines:
        _restart(name, plugins.load("engines", name).other_python(), argv)


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


def _restart(name: str, python: Path | None, argv: Sequence[str]) -> None:
    if python is None or sys.orig_argv[-len(argv) :] != [*argv]:
        return
    notice = f"engine {name} has an environment of its own: continuing with {python}"
    print(notice, file=sys.stderr, flush=True)
    os.execv(python, [str(python), *sys.orig_argv[1:]])
