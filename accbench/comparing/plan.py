"""The flags of `accbench compare`, and the plan that they ask for: rows and their runs' flags."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import tyro

from accbench import config, launchers, resolving
from accbench.comparing import defaults, update_rules
from accbench.config import TaskConfig, plugins
from accbench.config.field import check_ranges, flag
from accbench.config.task import MeshFlags
from accbench.distributed import mesh
from accbench.errors import RequestError
from accbench.report import conditions
from accbench.report.comparison import ComparisonPlan, RowPlan
from accbench.report.sequential import FIRST_LOOK


def _unset(name: str) -> str:
    """Tell the values of a flag that is left out."""
    (on_cpu, elsewhere), quick = defaults.DEFAULTS[name], defaults.QUICK_DEFAULTS[name]
    return f"Unset: {on_cpu} on a CPU, else {elsewhere}; with --quick {quick[0]} and {quick[1]}"


@dataclasses.dataclass(frozen=True)
class CompareFlags(TaskConfig):
    """Measure engines against a baseline, several times in turn, and say what was shown.

    It takes these flags and those of a run. Settings left out are chosen for the device: on a CPU
    a small model, so that a comparison takes minutes.
    """

    engines: str | None = flag(
        None,
        "Engines to compare, comma-separated; an engine's options follow it after colons: "
        "`ddp:channels_last=false,ddp,xla`. How a row shards follows likewise: "
        "`ddp,ddp:dp_shard=auto,ddp:tp=2`. Unset: ddp, inductor, and what is installed of xla and "
        "jax; on a CPU one of the two.",
    )
    baseline: str | None = flag(
        None, "The row that the others are compared with. Unset: the first."
    )
    quick: bool = flag(
        False,
        "A first look in two minutes, or three where compiling is slow: at most 4 rounds of few "
        "steps, no pass that compares training, none on synthetic data. The page says what was not "
        "tested.",
    )
    repeats: int | None = flag(
        None,
        "Rounds; each runs every engine once in a fresh process. With 4 or more, a row "
        "that is decided after 3 rounds or later, or is far off after 2, is measured no further. "
        "Unset: 8, or 4 with --quick, which looks once, at its end.",
        minimum=2,
    )
    max_repeats: int | None = flag(
        None,
        "Rounds of a row whose interval is too wide for a verdict after --repeats. Unset: twice "
        "--repeats, and no more than it where that is 2 or 3 or with --quick.",
    )
    max_minutes: float | None = flag(
        None,
        "Begin no round that would end later than so many minutes after the start; two are made in "
        "any case. Unset: no limit, or 2 with --quick.",
    )
    repeat_disturbed: bool = flag(
        True,
        "Measure a round again in which other programs, the hypervisor, heat or swapping took much "
        "of the machine; once each, and at most every second.",
    )
    alternate_windows: bool = flag(
        True,
        "On one machine's CPU, keep a round's runs of all rows alive and measure their windows in "
        "turn, so that a machine whose speed changes within seconds slows all alike. Runs follow "
        "each other where memory is short, with data loading processes, and with --script.",
    )
    min_effect: float = flag(
        0.02,
        "Smallest difference in speed that matters, as a fraction: 0.02 is 2 %.",
        minimum=0,
    )
    numerics_steps: int | None = flag(
        None,
        "Steps of the pass that compares losses, gradients and parameters; 0 skips it. Unset: 20 "
        "on a CPU, else 5, whose float64 is computed on the GPU where torch has CUDA; 0 with "
        "--quick.",
        minimum=0,
    )
    numerics_cache: bool = flag(
        True,
        "Keep float64's training and plain ddp's passes in the cache folder (4 GiB at most), for "
        "later comparisons of the same model, weights, batches, settings, machine and versions. "
        "Those of models and scripts of your own are never kept.",
    )
    input_round: bool = flag(
        True,
        "One more round on synthetic data, which shows the cost of loading data; on a CPU of the "
        "baseline alone, and without loading processes none: what making batches costs is measured "
        "between the steps.",
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

    # Unset: the device's value in `accbench.comparing.defaults`.
    model: str | None = flag(  # type: ignore[assignment]
        None,
        "A model's name, or package.module:attribute. Unset: resnet10 on a CPU, else resnet50.",
    )
    image_size: int | None = flag(  # type: ignore[assignment]
        None,
        "Height and width in pixels. Unset: 96 on a CPU, else 224.",
        minimum=1,
    )
    batch_size: int | None = flag(
        None,
        "Samples per worker and step; in a row with tp=2 two workers share twice as many. Unset: 4 "
        "on a CPU, else 128.",
        minimum=1,
    )
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
        f"Steps of a run, warm-up included. {_unset('max_steps')}.",
        minimum=1,
    )
    warmup_steps: int | None = flag(  # type: ignore[assignment]
        None,
        f"Steps of the first window. {_unset('warmup_steps')}; at most a third of --max_steps.",
        minimum=1,
    )
    log_interval: int | None = flag(  # type: ignore[assignment]
        None,
        f"Steps of every other window. {_unset('log_interval')}; few enough for five windows.",
        minimum=1,
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


# Flags of a run that a row may have as it has its engine's options.
_MESH_FLAGS = [field.name for field in dataclasses.fields(MeshFlags)]


@dataclasses.dataclass(frozen=True)
class CompareRequest:
    """What a command line asks for."""

    plan: ComparisonPlan
    folder: str | None
    """The folder to write to; None for a new one."""
    format: Literal["table", "json"]
    conditions: tuple[conditions.Condition, ...]
    """The conditions of `--fail_if`."""


def parse(argv: Sequence[str], prog: str) -> CompareRequest:
    """Parse a command line into a plan, where it goes and what it is asked.

    Raises:
        RequestError: a flag or a row is wrong, or the baseline cannot run here.
    """
    flags: Any = config.read_flags(argv, prog, CompareFlags)
    flags = defaults.fill_rounds(defaults.fill_for_device(flags))
    _check(flags)
    specs = [spec.strip() for spec in flags.engines.split(",") if spec.strip()]
    if len(specs) < 2:
        raise RequestError("--engines needs two or more, such as --engines ddp,xla")
    resolving.restart_for({spec.split(":")[0] for spec in specs}, argv)
    chosen: dict[str, Any] = {}
    rows = [_make_row(name, spec, flags, argv, chosen) for name, spec in _name_rows(specs)]
    baseline = rows[0].name if flags.baseline is None else flags.baseline
    names = [row.name for row in rows]
    if baseline not in names:
        raise RequestError(f"--baseline {baseline} is none of the rows: {', '.join(names)}")
    if all(row.task is None for row in rows):
        raise RequestError(f"no engine can run: {rows[0].reason}")
    asked = conditions.parse(flags.fail_if, names, baseline)
    blind = [each for each in asked if each.needs_numerics and not flags.numerics_steps]
    if blind:
        cause = "--quick" if flags.quick else "--numerics_steps 0"
        raise RequestError(
            f"--fail_if '{blind[0]}' needs the numerics pass, which {cause} leaves out"
        )
    base = rows[names.index(baseline)]
    if base.task is None:
        raise RequestError(f"the baseline cannot run: {base.reason}")
    others = [row for row in rows if row is not base]
    if all(row.task is None for row in others):
        raise RequestError(f"no row but the baseline can run: {others[0].reason}")
    takes_turns = defaults.alternates_windows(flags, rows)
    plan = ComparisonPlan(
        rows=tuple(rows), baseline=baseline, repeats=flags.repeats, min_effect=flags.min_effect,
        numerics_steps=flags.numerics_steps,
        input_round=flags.input_round and not flags.script and not flags.quick
        and not config.makes_batches_between_steps(base.task["device"], base.task["workers"]),
        input_round_of_baseline=base.task["device"] == "cpu",
        reuses_reference=flags.numerics_cache,
        price_per_hour=flags.price_per_hour, defaults=chosen, order_seed=flags.order_seed,
        max_repeats=flags.max_repeats, max_minutes=flags.max_minutes, quick=flags.quick,
        stops_when_decided=not flags.quick and flags.repeats > FIRST_LOOK,
        looks_for_far=not flags.quick and flags.repeats > FIRST_LOOK, takes_medians=True,
        repeat_rule=defaults.repeat_rule(flags, len(rows)),
        alternates_windows=takes_turns,
        usual_scatter=defaults.usual_scatter(flags, takes_turns),
    )  # fmt: skip
    folder = config.expand_home("--output_dir", flags.output_dir)
    return CompareRequest(plan, folder, flags.format, asked)


def _check(flags: Any) -> None:
    check_ranges(flags)
    defaults.check_rounds(flags)
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
    if mesh.workers_per_batch(flags) > 1:
        sizes = {"tp": flags.tp, "cp": flags.cp, "pp": flags.pp}
        asked = next(f"{name}={size}" for name, size in sizes.items() if size > 1)
        raise RequestError(
            f"compare has --tp, --cp and --pp in its rows alone: --engines ddp,ddp:{asked}"
        )
    if flags.sequence_parallel:
        raise RequestError(
            "compare has --sequence_parallel in its rows alone: --engines "
            "ddp,ddp:tp=2:sequence_parallel=on"
        )
    if flags.profile is not None:
        raise RequestError("a profile slows what compare measures; take --profile in a run")
    if flags.dry_run:
        raise RequestError(
            "compare has no --dry_run; `accbench run --dry_run` shows what it submits"
        )
    if flags.on_oom != "stop":
        raise RequestError("compare measures what was asked for; --on_oom halve is for training")
    if flags.resume is not None or flags.max_restarts or flags.save_interval or flags.save_steps:
        raise RequestError(
            "compare measures from the start and keeps no checkpoints: leave out "
            "--resume, --max_restarts, --save_interval and --save_steps"
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
    task = config.task_of(defaults.fill(flags, engine, chosen))
    values = config.as_mapping(task)
    options = values.setdefault(engine, {})
    for key, value in _parse_settings(spec, settings).items():
        (values if key in _MESH_FLAGS else options)[key] = value
    if options.get("cache_dir") is not None:
        raise RequestError(
            "compare keeps a compile cache for each row, empty before its first round: leave out "
            f"--{engine}.cache_dir"
        )
    del values["output_dir"]
    # Parse once more: only the flags' parser knows each option's name and type.
    try:
        task = config.task_of_values(values, "accbench run")
    except RequestError as error:
        raise RequestError(f"--engines {spec}: {error}") from None
    num_devices = config.devices_per_worker(task)
    if num_devices > 1:
        task = _of_one_worker(task, spec, num_devices)
    if task.batch_size is not None:
        # What is equal is the global batch, which fewer workers share out.
        shared = mesh.workers_per_batch(task) * num_devices
        task = dataclasses.replace(task, batch_size=task.batch_size * shared)
    try:
        task = launchers.resolve(task)
    except RequestError as error:
        return RowPlan(name, folder, None, str(error))
    values = config.as_mapping(task)
    del values["output_dir"]
    return RowPlan(name, folder, values)


def _of_one_worker(task: TaskConfig, spec: str, num_devices: int) -> TaskConfig:
    """Return the task for one worker that has all devices, of which other rows have one each.

    Raises:
        RequestError: the other rows have another number of them.
    """
    if num_devices != task.nproc_per_node:
        raise RequestError(
            f"--engines {spec}: the other rows have --nproc_per_node {task.nproc_per_node}, which "
            "is what data_parallel has to be"
        )
    workers = None if task.workers is None else task.workers * num_devices
    return dataclasses.replace(task, nproc_per_node=1, workers=workers)


def _parse_settings(spec: str, settings: list[str]) -> Mapping[str, str]:
    parsed = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise RequestError(f"--engines {spec}: {setting!r} is not of the form option=value")
        parsed[key.replace("-", "_")] = value
    return parsed
