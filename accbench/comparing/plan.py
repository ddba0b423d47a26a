"""The flags of `accbench compare`, and the plan that they ask for: rows and their runs' flags."""

import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import tyro

from accbench import config, launchers
from accbench.comparing import update_rules
from accbench.config import TaskConfig, plugins
from accbench.config.field import flag
from accbench.errors import RequestError
from accbench.report import conditions
from accbench.report.comparison import ComparisonPlan, RowPlan
from accbench.report.disturbance import RepeatRule
from accbench.report.sequential import FIRST_LOOK


@dataclasses.dataclass(frozen=True)
class CompareFlags(TaskConfig):
    """Measure engines against a baseline, several times in turn, and say what was shown.

    It takes these flags and those of a run. Settings left out are chosen for the device: on a CPU
    a small model, so that a comparison takes minutes.
    """

    engines: str = flag(
        "ddp,inductor,xla",
        "Engines to compare, comma-separated; an engine's options follow it after colons: "
        "`ddp:channels_last=false,ddp,xla`.",
    )
    baseline: str | None = flag(
        None, "The row that the others are compared with. Unset: the first."
    )
    repeats: int = flag(
        8,
        "Rounds, 2 or more; each runs every engine once in a fresh process. With 4 or more, a row "
        "that is decided after 3 rounds or later is measured no further.",
    )
    max_repeats: int | None = flag(
        None,
        "Rounds of a row whose interval is too wide for a verdict after --repeats. Unset: twice "
        "--repeats, and no more than it where that is 2 or 3.",
    )
    max_minutes: float | None = flag(
        None,
        "Begin no round that would end later than so many minutes after the start; two are made in "
        "any case. Unset: no limit.",
    )
    repeat_disturbed: bool = flag(
        True,
        "Measure a round again in which other programs, the hypervisor, heat or swapping took much "
        "of the machine; once each, and at most every second.",
    )
    min_effect: float = flag(
        0.02,
        "Smallest difference in speed that matters, as a fraction: 0.02 is 2 %.",
    )
    numerics_steps: int = flag(
        20,
        "Steps of the pass that compares losses, gradients and parameters; 0 skips it.",
    )
    input_round: bool = flag(
        True,
        "One more round on synthetic data, which shows the cost of loading data.",
    )
    price_per_hour: float | None = flag(
        None,
        "Price of all devices together for an hour, in any currency; the report then gives "
        "the price of an epoch.",
    )
    order_seed: int | None = flag(
        None,
        "Seed of the order in which each round measures the rows. Unset: drawn at random and "
        "recorded.",
    )
    format: Literal["table", "json"] = flag(
        "table",
        "What standard output holds in the end; json: one document and nothing else, the words go "
        "to standard error.",
    )
    fail_if: str | None = flag(
        None,
        "Conditions that end the command with status 3, comma-separated: `jax slower`, `xla slower "
        "than 0.9`, `jax differs`.",
    )
    compare: Annotated[bool, tyro.conf.FlagCreatePairsOff] = flag(
        False,
        "Run this command from launch_single_task.py.",
    )

    # Unset: the device's value in DEFAULTS.
    model: str | None = flag(  # type: ignore[assignment]
        None,
        "A model's name, or package.module:attribute. Unset: resnet10 on a CPU, else resnet50.",
    )
    image_size: int | None = flag(  # type: ignore[assignment]
        None,
        "Height and width in pixels. Unset: 96 on a CPU, else 224.",
    )
    batch_size: int | None = flag(None, "Samples per worker and step. Unset: 4 on a CPU, else 128.")
    amp_level: Literal["O0", "O1"] | None = flag(
        None,
        "O0: float32. O1: autocast. Unset: O0 on a CPU and with --script, else O1.",
    )
    lr: float | None = flag(  # type: ignore[assignment]
        None,
        "The learning rate. Unset: 1e-4 on a CPU, else 1e-3.",
    )
    max_steps: int | None = flag(
        None,
        "Steps of a run, warm-up included. Unset: 120 on a CPU, else 220.",
    )
    warmup_steps: int | None = flag(  # type: ignore[assignment]
        None,
        "Steps of the first window. Unset: 20.",
    )
    log_interval: int | None = flag(  # type: ignore[assignment]
        None,
        "Steps of every other window. Unset: 10 on a CPU, else 20.",
    )
    save_interval: int = flag(0, "Epochs between checkpoints; 0 makes none.")
    eval_interval: int = flag(0, "Epochs between evaluations; 0 never evaluates.")
    tensorboard: Literal["auto", "on", "off"] = flag(
        "off",
        "Write the rounds for TensorBoard as well.",
    )
    workers: int | None = flag(
        None,
        "Data loading processes per worker. Unset: none on a CPU, where they would take the cores "
        "from training, else cores / workers, at most 8.",
    )
    epochs: int | None = flag(  # type: ignore[assignment]
        None,
        "Passes over the data. Unset: as many as --max_steps needs.",
    )


# setting -> (on a CPU, on an accelerator)
DEFAULTS: dict[str, tuple[Any, Any]] = {
    "model": ("resnet10", "resnet50"),
    "image_size": (96, 224),
    "batch_size": (4, 128),
    "amp_level": ("O0", "O1"),
    "lr": (1e-4, 1e-3),
    "max_steps": (120, 220),
    "warmup_steps": (20, 20),
    "log_interval": (10, 20),
    "workers": (0, None),
    "epochs": (sys.maxsize, sys.maxsize),
}


# Steps after a warm-up that is longer than the default run.
_FEWEST_STEPS = 20
_WINDOWS = ("warmup_steps", "log_interval")


@dataclasses.dataclass(frozen=True)
class CompareRequest:
    """What a command line asks for."""

    plan: ComparisonPlan
    folder: str | None
    """Where to; None for a new folder."""
    format: Literal["table", "json"]
    conditions: tuple[conditions.Condition, ...]
    """Those of `--fail_if`."""


def parse(argv: Sequence[str], prog: str) -> CompareRequest:
    """Parse a command line into a plan, where it goes and what it is asked.

    Raises:
        RequestError: a flag or a row is wrong, or the baseline cannot run here.
    """
    flags = config.read_flags(argv, prog, CompareFlags)
    _check(flags)
    specs = [spec.strip() for spec in flags.engines.split(",") if spec.strip()]
    if len(specs) < 2:
        raise RequestError("--engines needs two or more, such as --engines ddp,xla")
    chosen: dict[str, Any] = {}
    rows = [_make_row(name, spec, flags, argv, chosen) for name, spec in _name_rows(specs)]
    baseline = rows[0].name if flags.baseline is None else flags.baseline
    names = [row.name for row in rows]
    if baseline not in names:
        raise RequestError(f"--baseline {baseline} is none of the rows: {', '.join(names)}")
    if all(row.task is None for row in rows):
        raise RequestError(f"no engine can run: {rows[0].reason}")
    base = rows[names.index(baseline)]
    if base.task is None:
        raise RequestError(f"the baseline cannot run: {base.reason}")
    plan = ComparisonPlan(
        rows=tuple(rows), baseline=baseline, repeats=flags.repeats, min_effect=flags.min_effect,
        numerics_steps=flags.numerics_steps, input_round=flags.input_round and not flags.script,
        price_per_hour=flags.price_per_hour, defaults=chosen, order_seed=flags.order_seed,
        stops_when_decided=flags.repeats > FIRST_LOOK, takes_medians=True,
        repeat_rule=_repeat_rule(flags, len(rows)),
    )  # fmt: skip
    folder = config.expand_home("--output_dir", flags.output_dir)
    return CompareRequest(
        plan, folder, flags.format, conditions.parse(flags.fail_if, names, baseline)
    )


def _max_repeats(repeats: int) -> int:
    return 2 * repeats if repeats > FIRST_LOOK else repeats


def _repeat_rule(flags: Any, num_rows: int) -> RepeatRule | None:
    if not flags.repeat_disturbed:
        return None
    return RepeatRule(max_repeats=max(2, num_rows * flags.repeats // 2))


def _check(flags: Any) -> None:
    for name, minimum in {"repeats": 2, "min_effect": 0, "numerics_steps": 0}.items():
        if not getattr(flags, name) >= minimum:
            raise RequestError(f"--{name} must be at least {minimum}, not {getattr(flags, name)}")
    _check_rounds(flags)
    if flags.price_per_hour is not None and not flags.price_per_hour > 0:
        raise RequestError(f"--price_per_hour must be more than 0, not {flags.price_per_hour}")
    if flags.compiler_opt or flags.engine != TaskConfig.engine:
        raise RequestError("compare takes --engines A,B,... in place of --engine or --compiler-opt")
    if flags.numerics_steps:
        update_rules.check(flags.optimizer)
    if flags.optimizer == "sgd" and not flags.momentum and flags.numerics_steps:
        raise RequestError(
            "compare reads gradients from the optimizer's momentum, and --momentum 0 keeps none: "
            "add --numerics_steps 0"
        )
    if not flags.nnodes.isdigit():
        raise RequestError(
            f"compare measures with as many nodes as --nnodes says, not {flags.nnodes}"
        )
    if flags.profile is not None:
        raise RequestError("a profile slows what compare measures; take --profile in a run")
    if flags.on_oom != "stop":
        raise RequestError("compare measures what was asked for; --on_oom halve is for training")
    if flags.resume is not None or flags.max_restarts or flags.save_interval or flags.save_steps:
        raise RequestError(
            "compare measures from the start and keeps no checkpoints: leave out "
            "--resume, --max_restarts, --save_interval and --save_steps"
        )


def _check_rounds(flags: Any) -> None:
    if flags.max_minutes is not None and not flags.max_minutes > 0:
        raise RequestError(f"--max_minutes must be more than 0, not {flags.max_minutes}")
    most = flags.max_repeats
    if most is not None and most < flags.repeats:
        raise RequestError(
            f"--max_repeats {most} is less than --repeats {flags.repeats}: give as many or more"
        )
    if most is not None and most > flags.repeats <= FIRST_LOOK:
        raise RequestError(
            f"--max_repeats {most} goes on after looks, which begin with --repeats "
            f"{FIRST_LOOK + 1}: raise --repeats, or leave --max_repeats out"
        )


def _name_rows(specs: list[str]) -> list[tuple[str, str]]:
    """Return the (name, spec) of each row; a row that is asked for twice gets a number."""
    rows: list[tuple[str, str]] = []
    for spec in specs:
        num_earlier = sum(1 for _, other in rows if other == spec)
        rows.append((f"{spec}#{num_earlier + 1}" if num_earlier else spec, spec))
    return rows


def _make_row(
    name: str, spec: str, flags: Any, argv: Sequence[str], chosen: dict[str, Any]
) -> RowPlan:
    engine, *settings = spec.split(":")
    folder = re.sub(r"[^A-Za-z0-9_=.-]+", "-", name)
    plugins.load("engines", engine)  # an unknown engine is an error, not a row that failed
    task = config.task_of(_apply_defaults(flags, engine, chosen))
    values = config.as_mapping(task)
    options = values.setdefault(engine, {})
    options.update(_parse_settings(spec, settings))
    del values["output_dir"]
    # Parse once more: only the flags' parser knows each option's name and type.
    try:
        task = config.parse(config.as_flags(values), "accbench run")
    except RequestError as error:
        raise RequestError(f"--engines {spec}: {error}") from None
    try:
        task = launchers.resolve(task)
    except RequestError as error:
        return RowPlan(name, folder, None, str(error))
    values = config.as_mapping(task)
    del values["output_dir"]
    return RowPlan(name, folder, values)


def _apply_defaults(flags: Any, engine: str, chosen: dict[str, Any]) -> Any:
    """Return one engine's flags, with defaults for its device in place of flags left out."""
    if flags.script is not None:  # the script itself decides most settings
        flags = dataclasses.replace(flags, eval_interval=TaskConfig.eval_interval)
    on_cpu = plugins.load("engines", engine).find_device(flags.device) == "cpu"
    defaults = {
        name: on_cpu_value if on_cpu else elsewhere
        for name, (on_cpu_value, elsewhere) in DEFAULTS.items()
        if getattr(flags, name) is None
        and (flags.script is None or name in ("max_steps", *_WINDOWS))
    }
    _fit(flags, defaults)
    chosen.update(
        {n: value for n, value in defaults.items() if n != "epochs" and value is not None}
    )
    return dataclasses.replace(flags, engine=engine, **defaults)


def _fit(flags: Any, chosen: dict[str, Any]) -> None:
    """Adjust chosen defaults, so that the given flags leave room for windows to measure.

    Raises:
        RequestError: the given flags leave none.
    """

    def value(name: str) -> int:
        return int(chosen.get(name, getattr(flags, name)))

    if "max_steps" in chosen:
        chosen["max_steps"] = max(chosen["max_steps"], value("warmup_steps") + _FEWEST_STEPS)
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
        chosen["log_interval"] = max(1, min(chosen["log_interval"], num_timed // 2))


def _parse_settings(spec: str, settings: list[str]) -> Mapping[str, str]:
    parsed = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise RequestError(f"--engines {spec}: {setting!r} is not of the form option=value")
        parsed[key.replace("-", "_")] = value
    return parsed
