"""The settings that `accbench compare` chooses where the flags leave them out."""

import dataclasses
import importlib.util
import socket
import sys
from collections.abc import Sequence
from typing import Any

from accbench.config import TaskConfig, plugins
from accbench.errors import RequestError
from accbench.pjrt import devices
from accbench.report.comparison import RowPlan
from accbench.report.disturbance import RepeatRule
from accbench.report.sequential import FIRST_LOOK

# setting -> (on a CPU, on an accelerator)
DEFAULTS: dict[str, tuple[Any, Any]] = {
    "model": ("resnet10", "resnet50"),
    "image_size": (96, 224),
    "batch_size": (4, 128),
    "amp_level": ("O0", "O1"),
    "lr": (1e-4, 1e-3),
    "max_steps": (55, 220),
    "warmup_steps": (5, 20),
    "log_interval": (5, 20),
    "workers": (0, None),
    "epochs": (sys.maxsize, sys.maxsize),
}
# In their place with --quick.
QUICK_DEFAULTS: dict[str, tuple[Any, Any]] = {
    "max_steps": (26, 60),
    "warmup_steps": (6, 20),
    "log_interval": (4, 8),
}
# Standard deviation of the logarithm of a round's ratio on a CPU: above the 2 to 4 % that it is
# where windows take turns (docs/compare.md). Accelerators scatter far less, and two rounds of one
# are enough.
USUAL_SCATTER_ON_CPU = 0.05
# Flag -> (value, value with --quick).
_ROUNDS: dict[str, tuple[Any, Any]] = {
    "repeats": (8, 4),
    "numerics_steps": (20, 0),
    "max_minutes": (None, 2.0),
}

# Steps after a warm-up that is longer than the default run.
_FEWEST_STEPS = 20
# Windows that are chosen, so that their median bears one that was disturbed; and those without
# which there is none.
_WANTED_WINDOWS, _FEWEST_WINDOWS = 5, 2
_WINDOWS = ("warmup_steps", "log_interval")
# Its float64 takes far longer than what it is held against.
_NUMERICS_STEPS_ON_GPU = 5


def fill_for_device(flags: Any) -> Any:
    """Return the flags with engines, and on an accelerator a numerics pass, that fit the device."""
    on_cpu = devices.find(flags.device) == "cpu"
    if flags.engines is None:
        has_torch_xla, has_jax = (
            importlib.util.find_spec(package) is not None for package in ("torch_xla", "jax")
        )
        asks_jax = has_jax and not (on_cpu and has_torch_xla)
        engines = ["ddp", "inductor", *["jax"] * asks_jax, *["xla"] * has_torch_xla]
        flags = dataclasses.replace(flags, engines=",".join(engines))
    if flags.numerics_steps is None and not on_cpu and not flags.quick:
        flags = dataclasses.replace(flags, numerics_steps=_NUMERICS_STEPS_ON_GPU)
    return flags


def fill_rounds(flags: Any) -> Any:
    """Return the flags with numbers of rounds and minutes in place of those left out."""
    values = {
        name: quick_value if flags.quick else value
        for name, (value, quick_value) in _ROUNDS.items()
        if getattr(flags, name) is None
    }
    flags = dataclasses.replace(flags, **values)
    if flags.max_repeats is None:
        goes_on = flags.repeats > FIRST_LOOK and not flags.quick
        flags = dataclasses.replace(flags, max_repeats=flags.repeats * (2 if goes_on else 1))
    return flags


def check_rounds(flags: Any) -> None:
    """Refuse numbers of rounds that contradict each other.

    Raises:
        RequestError: they do.
    """
    if flags.max_minutes is not None and not flags.max_minutes > 0:
        raise RequestError(f"--max_minutes must be more than 0, not {flags.max_minutes}")
    most = flags.max_repeats
    if most < flags.repeats:
        raise RequestError(
            f"--max_repeats {most} is less than --repeats {flags.repeats}: give as many or more"
        )
    if most > flags.repeats and (flags.quick or flags.repeats <= FIRST_LOOK):
        why = "--quick looks once, at its end" if flags.quick else (
            f"looks begin with --repeats {FIRST_LOOK + 1}"
        )  # fmt: skip
        raise RequestError(
            f"--max_repeats {most} goes on where a look decides nothing, and {why}: leave it out"
        )


def repeat_rule(flags: Any, num_rows: int) -> RepeatRule | None:
    """Return the rule of disturbed rounds; None if the flags repeat none.

    A quick comparison has no time to repeat any, and still names them.
    """
    if not flags.repeat_disturbed:
        return None
    if flags.quick:
        return RepeatRule(max_repeats=0)
    return RepeatRule(max_repeats=max(2, num_rows * flags.repeats // 2))


def alternates_windows(flags: Any, rows: Sequence[RowPlan]) -> bool:
    """Return whether the rows' runs take turns: only where nothing of theirs goes on in between.

    Accelerators hold on to their memory, and loading processes fetch batches ahead.
    """
    tasks = [row.task for row in rows if row.task is not None]
    return (
        flags.alternate_windows
        and flags.script is None
        and len(tasks) > 1
        and hasattr(socket, "AF_UNIX")
        and all(
            (task["device"], task["launcher"], task["nnodes"], task["workers"])
            == ("cpu", "local", "1", 0)
            for task in tasks
        )
    )


def usual_scatter(flags: Any, takes_turns: bool) -> float | None:
    """Return the scatter of ratios that intervals take as known: of few rounds in turn, on a CPU.

    Where runs follow each other they scatter by as much as the machine's speed changes.
    """
    return USUAL_SCATTER_ON_CPU if flags.quick and takes_turns else None


def fill(flags: Any, engine: str, chosen: dict[str, Any]) -> Any:
    """Return one engine's flags, with values for its device in place of flags left out.

    Args:
        flags: as given.
        engine: the engine's name.
        chosen: gets the values.

    Raises:
        RequestError: the given flags leave no windows to measure.
    """
    if flags.script is not None and not flags.eval_interval:  # the script itself decides
        flags = dataclasses.replace(flags, eval_interval=TaskConfig.eval_interval)
    on_cpu = plugins.load("engines", engine).find_device(flags.device) == "cpu"
    by_device = DEFAULTS | (QUICK_DEFAULTS if flags.quick else {})
    values = {
        name: on_cpu_value if on_cpu else elsewhere
        for name, (on_cpu_value, elsewhere) in by_device.items()
        if getattr(flags, name) is None
        and (flags.script is None or name in ("max_steps", *_WINDOWS))
    }
    _fit(flags, values)
    chosen.update({n: value for n, value in values.items() if n != "epochs" and value is not None})
    return dataclasses.replace(flags, engine=engine, **values)


def _fit(flags: Any, chosen: dict[str, Any]) -> None:
    """Adjust chosen values, so that the given flags leave room for windows to measure.

    Raises:
        RequestError: the given flags leave none.
    """

    def value(name: str) -> int:
        return int(chosen.get(name, getattr(flags, name)))

    if "max_steps" in chosen:
        num_timed = _FEWEST_STEPS
        if "log_interval" not in chosen:
            num_timed = max(num_timed, _WANTED_WINDOWS * value("log_interval"))
        chosen["max_steps"] = max(chosen["max_steps"], value("warmup_steps") + num_timed)
    max_steps = value("max_steps")
    if "warmup_steps" in chosen:
        chosen["warmup_steps"] = max(1, min(chosen["warmup_steps"], max_steps // 3))
    num_timed = max_steps - value("warmup_steps")
    if num_timed < 1:
        raise RequestError(
            f"--max_steps {max_steps} leaves nothing to measure after --warmup_steps "
            f"{value('warmup_steps')}: give more steps, or a shorter warm-up"
        )
    if "log_interval" in chosen:
        chosen["log_interval"] = max(1, min(chosen["log_interval"], num_timed // _WANTED_WINDOWS))
    if num_timed // value("log_interval") < _FEWEST_WINDOWS:
        raise RequestError(
            f"--max_steps {max_steps} leaves {num_timed} steps to measure after the warm-up, and a "
            f"verdict needs {_FEWEST_WINDOWS} windows of --log_interval {value('log_interval')}: "
            "give more steps, or shorter windows"
        )
