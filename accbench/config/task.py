"""Flags, or a YAML file with flags winning, to one frozen `TaskConfig`."""

import contextlib
import dataclasses
import io
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from accbench.config import flag_values, plugins
from accbench.errors import RequestError

RECORDS_FILE = "records.jsonl"
CONFIG_FILE = "config.json"


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """Train a model on this machine, one worker a device, and record how it went.

    Options that only one engine or data source has are listed below it by name,
    as in `--ddp.no-channels-last`.
    """

    nproc_per_node: int = 1
    """Workers on this machine, one a device."""
    engine: str = "ddp"
    """What trains: ddp (the baseline), inductor, xla (through torch_xla), jax (XLA through JAX), or
    another file's name in accbench/engines."""
    compiler_opt: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """The same as --engine xla."""
    amp_level: Literal["O0", "O1"] | None = None
    """O0: float32. O1: autocast to --amp_dtype. Unset: O1; with --script and in
    `accbench.accelerate`, whose numbers are the script's own, O0 unless --amp_dtype is given."""
    amp_dtype: Literal["float16", "bfloat16"] | None = None
    """Type under O1; float16 adds a GradScaler. Unset: float16 on CUDA, else bfloat16."""
    batch_size: int | None = None
    """Samples a worker and step. Unset: 128 on an accelerator, 8 on a CPU."""
    model: str = "resnet50"
    """A model's name, FAMILY:NAME as timm:vit_small_patch16_224, or package.module:attribute: a
    callable, called with num_classes, or a spec with a loss of its own."""
    image_size: int = 224
    """Height and width of the images the model sees, in pixels."""
    seq_len: int = 128
    """Tokens of a sample, of models for text and of --data tokens."""
    script: str | None = None
    """A script of your own, which trains by `accbench.accelerate`, to be run in each worker. What
    it decides by itself, from the model to the learning rate, has no flag then."""
    script_args: str = ""
    """The script's own arguments, in one string, quoted as in a shell."""
    data: str = "mock"
    """NAME, NAME:LOCATION or a URL: mock, synthetic, imagefolder:DIR, recordio:FILE.rec or
    recordio:DIR, s3://BUCKET/PREFIX, tokens:FILE_OR_DIR, coco:DIR."""
    launcher: str = "local"
    """What starts the workers: local, elastic (several nodes), slurm, dask, or another file's name
    in accbench/launchers."""
    nnodes: str = "1"
    """Machines: a number, or MIN:MAX, between which they may come and go. Each is given the same
    command, and torch elastic joins them (--launcher elastic); Slurm finds them by itself."""
    node_rank: int | None = None
    """0 on the node that keeps the run's folder and its record. Unset: where --rdzv_endpoint is."""
    rdzv_endpoint: str | None = None
    """HOST:PORT at which the nodes meet, an address of node 0."""
    rdzv_id: str = "accbench"
    """The run's name there, the same on all nodes."""
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print what would be submitted, and do nothing."""
    device: Literal["auto", "cpu", "cuda", "tpu"] = "auto"
    """auto takes the accelerator that is there and never falls back from it to the CPU."""
    epochs: int = 1
    """Passes over the data; the run ends here or at --max_steps, whichever is first."""
    max_steps: int | None = None
    """Optimizer steps after which the run ends."""
    warmup_steps: int = 5
    """Steps of the first window, which holds compilation and is kept out of every speed."""
    log_interval: int = 10
    """Steps of every other window; the host waits for the device only at a window's end."""
    eval_interval: int = 1
    """Epochs between evaluations; 0 never evaluates."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """torch's own, in its fused form, and under XLA in the one that never waits for the host."""
    lr: float = 1e-3
    """The learning rate."""
    lr_schedule: Literal["constant", "cosine", "linear", "step"] = "constant"
    """How the learning rate changes after its warm-up, a step at a time."""
    lr_warmup_epochs: float = 0.0
    """Epochs in which it grows from next to nothing to --lr."""
    lr_final: float = 0.0
    """Of cosine and linear: the part of --lr at the end."""
    lr_step_epochs: float = 30.0
    """Of step: epochs between two cuts."""
    lr_step_factor: float = 0.1
    """Of step: what each cut multiplies the rate by."""
    weight_decay: float = 1e-2
    """AdamW's decoupled decay; SGD's L2 penalty."""
    decay: Literal["all", "matrices"] = "all"
    """Which parameters decay: matrices leaves out those of one dimension, norms and biases."""
    momentum: float = 0.9
    """Of --optimizer sgd."""
    nesterov: bool = False
    """Nesterov's momentum, of --optimizer sgd."""
    clip_norm: float | None = None
    """Scale gradients down to this L2 norm, all parameters together, where they exceed it."""
    accumulate: int = 1
    """Parts that a worker cuts each step's batch into, one after the other, which takes less
    memory; their gradients are averaged."""
    checkpoint_modules: str | None = None
    """Classes of modules, as TransformerBlock,Bottleneck, whose activations are not kept but
    computed again in the backward pass: less memory, more time."""
    ema_decay: float = 0.0
    """Keep an exponential moving average of the weights, evaluate and export it too: 0.999 moves
    it by a thousandth of the way in each step. 0: none."""
    label_smoothing: float = 0.0
    """Part of each label that is spread over all classes."""
    mixup: float = 0.0
    """Mix pairs of images, by parts drawn from Beta(mixup, mixup). 0: no."""
    cutmix: float = 0.0
    """Paste a part of one image into another, its size drawn likewise; with --mixup each batch
    gets one of the two. 0: no."""
    seed: int = 0
    """Seed of the weights, the order of the data and the augmentation."""
    workers: int | None = None
    """Data loading processes a worker. Unset: cores / workers, at most 8."""
    threads: int | None = None
    """CPU threads a worker computes with. Unset: cores / workers."""
    max_bad_samples: int = 0
    """Samples a worker may fail to read and skip before the run ends with an error."""
    timeout_s: float = 600.0
    """Seconds a worker waits in a collective for the others before the run ends."""
    save_interval: int = 1
    """Epochs between checkpoints; one more is made at the end, and when the run is stopped by
    SIGTERM or Ctrl-C. 0 makes none."""
    save_steps: int | None = None
    """Also a checkpoint every so many optimizer steps."""
    keep_checkpoints: int = 2
    """The newest that stay; the one with the best top-1, or else the lowest loss, stays as well."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """What to do when a checkpoint cannot be written, the disk being full for one."""
    resume: str | None = None
    """Go on from a checkpoint: auto is the newest whole one in --output_dir; or the folder of
    a run or of a checkpoint."""
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    """What to do when the loss is NaN or infinite, or the loss scale has fallen to nothing: skip
    leaves out the steps whose gradients are; rollback takes the weights of the newest checkpoint
    and goes on behind the data that did it."""
    max_rollbacks: int = 3
    """Of --on_nan rollback: how often, before the run ends after all."""
    max_recompiles: int | None = None
    """Graphs that may be compiled after the warm-up before the run ends with what caused it."""
    max_skips: int = 3
    """Of --on_nan skip: how many steps, before the run ends after all."""
    on_oom: Literal["stop", "halve"] = "stop"
    """What to do when memory is out: halve starts again with half the batch size."""
    max_restarts: int = 0
    """How often workers are started again, from the newest checkpoint, after one failed; on
    several nodes, how often each node starts its own."""
    tensorboard: Literal["auto", "on", "off"] = "auto"
    """Write scalars and some training images for TensorBoard. auto: where it is installed."""
    profile: int | None = None
    """Trace so many steps, after the first window behind the warm-up, for Perfetto."""
    output_dir: str | None = None
    """The run's folder. Unset: runs/<time>-<engine>-<model>."""
    config: str | None = None
    """A YAML file with any of these flags; flags on the command line win."""
    options: Annotated[Mapping[str, Any], tyro.conf.Suppress] = dataclasses.field(
        default_factory=dict
    )
    """Plug-in name -> its Options, for those that this task uses."""

    @property
    def run_dir(self) -> Path:
        """The run's folder; only after `resolve`."""
        assert self.output_dir is not None
        return Path(self.output_dir)


# field -> smallest value allowed. A plug-in's `Options` may have such a `minimum` of its own,
# and a `maximum`.
_MINIMUM: Mapping[str, float] = {
    "nproc_per_node": 1, "node_rank": 0, "batch_size": 1, "image_size": 1, "seq_len": 1,
    "epochs": 1, "max_steps": 1, "warmup_steps": 1, "log_interval": 1, "eval_interval": 0, "lr": 0,
    "weight_decay": 0,
    "momentum": 0, "clip_norm": 1e-12, "accumulate": 1, "ema_decay": 0, "label_smoothing": 0,
    "mixup": 0, "cutmix": 0,
    "lr_warmup_epochs": 0, "lr_final": 0, "lr_step_epochs": 1e-6, "lr_step_factor": 0,
    "workers": 0, "threads": 1, "max_bad_samples": 0, "timeout_s": 1,
    "save_interval": 0, "save_steps": 1, "keep_checkpoints": 1, "max_restarts": 0,
    "max_rollbacks": 0, "max_skips": 0, "max_recompiles": 0, "profile": 1,
}  # fmt: skip
# field -> largest. Timeouts reach C++ as milliseconds in 32 bits.
_MAXIMUM: Mapping[str, float] = {
    "lr": sys.float_info.max, "weight_decay": sys.float_info.max, "timeout_s": 1e6,
    "lr_warmup_epochs": 1e9, "lr_final": 1e9, "lr_step_epochs": 1e9, "lr_step_factor": 1e9,
    "momentum": 1, "clip_norm": sys.float_info.max, "ema_decay": 1, "label_smoothing": 1,
    "mixup": 1e6, "cutmix": 1e6, "seed": 2**62,
}  # fmt: skip


# What a script decides by itself, or what is not there for it.
SCRIPTS_OWN = (
    "model", "image_size", "seq_len", "data", "epochs", "eval_interval", "optimizer", "lr",
    "lr_schedule", "lr_warmup_epochs", "lr_final", "lr_step_epochs", "lr_step_factor",
    "weight_decay", "decay", "momentum", "nesterov", "clip_norm", "accumulate", "ema_decay",
    "label_smoothing", "mixup", "cutmix", "workers", "max_bad_samples", "save_interval",
    "save_steps", "keep_checkpoints", "on_save_error", "resume", "on_nan", "max_rollbacks",
    "max_skips", "on_oom", "max_restarts", "profile",
)  # fmt: skip


def parse(argv: Sequence[str], prog: str = "launch_single_task.py") -> TaskConfig:
    """A task from command-line arguments. Nothing is looked up on the machine yet.

    Raises:
        RequestError: a flag, or a key of the YAML file, is unknown or of a wrong type.
    """
    return task_of(read_flags(argv, prog))


def read_flags(argv: Sequence[str], prog: str, base: type[TaskConfig] = TaskConfig) -> Any:
    """The flags of `base`, of every plug-in and of the YAML file, as one object.

    Raises:
        RequestError: a flag, or a key of the YAML file, is unknown or of a wrong type.
    """
    flags_class = _flags_class(base)
    given = parse_flags(flags_class, argv, prog)
    if given.config is not None:
        content = flag_values.read(Path(in_full("--config", given.config) or ""))
        try:
            from_file = flag_values.as_flags(content, flags_class)
            # Of the flags it is known by now that they are right.
            given = parse_flags(flags_class, [*from_file, *argv], prog)
        except RequestError as error:
            raise RequestError(f"{given.config}: {error}") from None
    return given


def parse_flags(flags_class: Any, argv: Sequence[str], prog: str) -> Any:
    """`tyro.cli`, with its boxed messages turned into one line.

    Raises:
        RequestError: the arguments do not fit `flags_class`.
    """
    message = io.StringIO()
    args = list(argv)
    for place in range(len(args) - 1, 0, -1):  # its value most often begins as a flag does
        if args[place - 1] in ("--script_args", "--script-args"):
            args[place - 1 : place + 1] = [f"--script_args={args[place]}"]
    try:
        with contextlib.redirect_stderr(message):
            return tyro.cli(
                flags_class, args=args, prog=prog, use_underscores=True,
                # No flag's text is a comment; the search takes longer than all else here.
                config=(tyro.conf.HelptextFromCommentsOff,),
            )  # fmt: skip
    except SystemExit as exit_:
        if not exit_.code:  # --help
            raise
        raise RequestError(_one_line(message.getvalue(), prog)) from None


def _one_line(boxed: str, prog: str) -> str:
    # tyro frames its message, where the terminal has no line-drawing characters by
    # dashes; rules inside the frame end a part, and the first line is a title.
    lines = [line.strip("│|╭╰+ ") for line in boxed.splitlines()]
    parts = re.split(r"[─-]{4,}", "\n".join(line for line in lines if line), maxsplit=2)
    message = " ".join((parts[1] if len(parts) > 1 else boxed).split("Got errors:")[0].split())
    text = message.replace(" .", ".").strip("─╮ ").rstrip(".")
    suggestion = re.search(r"Perhaps you meant:\s+(--[\w.-]+)", "\n".join(lines))
    if suggestion:
        text += f"; perhaps you meant {suggestion[1]}"
    return f"{text}; see {prog} --help"


def _flags_class(base: type[TaskConfig]) -> type:
    """`base` with a nested group for every plug-in that has `Options`."""
    groups: list[tuple[str, Any, Any]] = []
    for kind in plugins.KINDS:
        for name, plugin in plugins.classes(kind).items():
            options = getattr(plugin, "Options", None)
            if options is not None and dataclasses.fields(options):
                groups.append((name, options, dataclasses.field(default_factory=options)))
    flags = dataclasses.make_dataclass("Flags", groups, bases=(base,), frozen=True)
    flags.__doc__ = base.__doc__
    return flags


def as_flags(values: Mapping[str, Any]) -> list[str]:
    """A task's values, as `as_mapping` has them or as text, as the flags of a run.

    Raises:
        RequestError: a value is neither on nor off where it must be one of them.
    """
    return flag_values.as_flags(values, _flags_class(TaskConfig))


def task_of(flags: Any) -> TaskConfig:
    """The task that flags of `read_flags` ask for.

    Raises:
        RequestError: flags contradict each other, or a value is too small.
    """
    engine = flags.engine
    if flags.compiler_opt:
        if engine not in ("xla", TaskConfig.engine):
            raise RequestError(f"--compiler-opt means --engine xla, but --engine is {engine}")
        engine = "xla"
    values = {f.name: getattr(flags, f.name) for f in dataclasses.fields(TaskConfig)}
    values |= {name: in_full(f"--{name}", values[name]) for name in _PATHS}
    used = {engine, flags.launcher, data_name(flags.data)[0]}
    options = {
        name: _with_caches_in_full(name, getattr(flags, name))
        for name in used
        if hasattr(flags, name)
    }
    task = TaskConfig(**{**values, "engine": engine, "compiler_opt": False, "options": options})
    _check_range("", task, _MINIMUM, _MAXIMUM)
    if task.script is not None:
        _check_script(task)
    for name, group in options.items():
        minimum, maximum = getattr(group, "minimum", {}), getattr(group, "maximum", {})
        _check_range(f"{name}.", group, minimum, maximum)
    return task


# Besides `--data`, whose location may be one, and `cache_dir` of plug-ins' options.
_PATHS = ("output_dir", "resume", "script", "config", "data")


def in_full(flag: str, value: str | None) -> str | None:
    """Put the home in the place of `~/`, which a shell leaves behind `=` and in a YAML file.

    Raises:
        RequestError: there is no home.
    """
    name, colon, path = (value or "").rpartition(":")
    if not path.startswith("~/"):
        return value
    full = os.path.expanduser(path)
    if not os.path.isabs(full):
        raise RequestError(f"{flag} {value}: HOME is not set; name the path in full")
    return f"{name}{colon}{full}"


def _with_caches_in_full(name: str, options: Any) -> Any:
    folder = getattr(options, "cache_dir", None)
    if folder is None:
        return options
    return dataclasses.replace(options, cache_dir=in_full(f"--{name}.cache_dir", folder))


def _check_script(task: TaskConfig) -> None:
    defaults = {f.name: f.default for f in dataclasses.fields(TaskConfig)}
    for name in SCRIPTS_OWN:
        # Checkpoints are made by nobody, which 0 says as well.
        if getattr(task, name) not in (defaults[name], 0 if name == "save_interval" else None):
            raise RequestError(
                f"--{name} is not for a script, which decides that by itself: leave it out "
                "with --script, or pass it on by --script_args"
            )


def _check_range(
    prefix: str, values: Any, minimum: Mapping[str, float], maximum: Mapping[str, float]
) -> None:
    # Asked so that a value which is no number is refused as well.
    for name, limit in minimum.items():
        value = getattr(values, name)
        if value is not None and not value >= limit:
            raise RequestError(f"--{prefix}{name} must be at least {limit:g}, not {value}")
    for name, limit in maximum.items():
        value = getattr(values, name)
        if value is not None and not value <= limit:
            raise RequestError(f"--{prefix}{name} must be at most {limit:g}, not {value}")


def amp_level(task: TaskConfig) -> Literal["O0", "O1"]:
    """Return the task's level of mixed precision, O0 or O1, also where none was given."""
    is_mixed = task.script is None or task.amp_dtype is not None
    return task.amp_level or ("O1" if is_mixed else "O0")


def data_name(data: str) -> tuple[str, str | None]:
    """`--data` as (source, location): NAME, NAME:LOCATION, or a URL, which is both."""
    if "://" in data:
        return data.split("://", 1)[0], data
    name, _, location = data.partition(":")
    return name, location or None


def as_mapping(task: TaskConfig) -> dict[str, Any]:
    """The task as plain values: what `config.json` and a run record hold, and `--config` reads."""
    values = dataclasses.asdict(task)
    options = values.pop("options")
    del values["compiler_opt"], values["config"]
    if task.script is None:
        del values["script"], values["script_args"]
        return {**values, **options}
    data_source = data_name(task.data)[0]
    return {
        **{name: value for name, value in values.items() if name not in SCRIPTS_OWN},
        **{name: group for name, group in options.items() if name != data_source},
    }
