"""The flags of a run, by groups, as one frozen `TaskConfig`."""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from accbench.config.field import flag, names_with

RECORDS_FILE = "records.jsonl"
CONFIG_FILE = "config.json"


@dataclasses.dataclass(frozen=True)
class WorkerFlags:
    """Choose where a run trains, and how its workers find each other."""

    nproc_per_node: int = flag(1, "Workers on this machine, one per device.", minimum=1)
    device: Literal["auto", "cpu", "cuda", "tpu"] = flag(
        "auto",
        "auto uses the accelerator if there is one, and never falls back from it to the CPU.",
    )
    threads: int | None = flag(
        None,
        "CPU threads per worker. Unset: cores / workers.",
        minimum=1,
    )
    launcher: str = flag(
        "local",
        "What starts the workers: local, elastic (several nodes), slurm, dask, or another "
        "file's name in accbench/launchers.",
    )
    nnodes: str = flag(
        "1",
        "Number of machines, or MIN:MAX for a number that may change during the run. Start the "
        "same command on each, and torch elastic joins them (--launcher elastic); Slurm finds "
        "them by itself.",
    )
    node_rank: int | None = flag(
        None,
        "0 on the node that writes the run's folder and its record. Unset: node 0 is the one at "
        "--rdzv_endpoint.",
        minimum=0,
    )
    rdzv_endpoint: str | None = flag(
        None,
        "HOST:PORT at which the nodes meet, an address of node 0.",
    )
    rdzv_id: str = flag("accbench", "The run's name at the rendezvous, the same on all nodes.")
    timeout_s: float = flag(
        600.0,
        "Seconds a worker waits in a collective for the others before the run ends.",
        minimum=1,
        maximum=1000000.0,
    )
    max_restarts: int = flag(
        0,
        "How often workers are restarted from the newest checkpoint after one failed; on several "
        "nodes, how often each node restarts its own. Not with --launcher slurm, which requeues.",
        minimum=0,
        of_scripts=False,
    )
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = flag(
        False,
        "Print what would be submitted, and do nothing else.",
    )


@dataclasses.dataclass(frozen=True)
class EngineFlags:
    """Choose what compiles the step, and in which types it computes."""

    engine: str = flag(
        "ddp",
        "What trains: ddp (the baseline), inductor, xla (through torch_xla), jax (XLA through "
        "JAX), or another file's name in accbench/engines.",
    )
    compiler_opt: Annotated[bool, tyro.conf.FlagCreatePairsOff] = flag(
        False,
        "The same as --engine xla.",
    )
    amp_level: Literal["O0", "O1"] | None = flag(
        None,
        "O0: float32. O1: autocast to --amp_dtype. Unset: O1; with --script and in "
        "`accbench.accelerate`, whose numbers are the script's own, O0 unless --amp_dtype is "
        "given.",
    )
    amp_dtype: Literal["float16", "bfloat16"] | None = flag(
        None,
        "Type under O1; float16 adds a GradScaler. Unset: float16 on CUDA, else bfloat16.",
    )
    tf32: Literal["on", "off"] = flag(
        "off",
        "On NVIDIA GPUs, let products of float32 (matrices and convolutions) round their factors "
        "to TF32, which is faster: the same for every engine, under O0 and O1. A script sets it "
        "itself, as torch has it.",
        of_scripts=False,
    )
    max_recompiles: int | None = flag(
        None,
        "Graphs that may be compiled after the warm-up before the run ends with what caused it.",
        minimum=0,
    )
    checkpoint_modules: str | None = flag(
        None,
        "Module classes, such as TransformerBlock,Bottleneck, whose activations are recomputed in "
        "the backward pass instead of stored: less memory, more time.",
    )


@dataclasses.dataclass(frozen=True)
class MeshFlags:
    """Choose how the workers share a model and its training state."""

    dp_shard: str | None = flag(
        None,
        "Shard parameters, gradients and optimizer state over this many workers, each with a "
        "batch of its own; auto: over all. The workers that remain are replicas. Unset: each "
        "worker has the whole model.",
    )
    zero: Literal[1, 2, 3] | None = flag(
        None,
        "What --dp_shard shards: 1 the optimizer's state, 2 gradients too, 3 parameters too. "
        "Unset: 3.",
    )
    tp: int = flag(
        1,
        "Tensor parallelism: cut the products of each layer over this many workers, which share a "
        "batch, by the model's plan (docs/parallel.md).",
        minimum=1,
    )
    sequence_parallel: bool = flag(
        False,
        "With --tp: norms, dropout and residuals between the cut layers compute a part of each "
        "sequence on each worker, by the model's plan, and so keep fewer activations "
        "(docs/parallel.md).",
    )
    cp: int = flag(
        1,
        "Context parallelism: cut each sequence over this many workers, which share a batch.",
        minimum=1,
    )
    cp_attention: Literal["ulysses", "ring"] = flag(
        "ulysses",
        "How workers of --cp attend to each other's parts. ulysses: they exchange positions for "
        "heads, whose number limits --cp. ring: keys and values go round the workers, for any "
        "number of heads.",
    )
    offload: Literal["none", "optimizer", "all"] = flag(
        "none",
        "What lies in host memory between steps. optimizer: the optimizer's state, and the step "
        "runs there (ZeRO-Offload). all: parameters too, with --dp_shard; each block is copied to "
        "the device before it computes.",
    )
    pp: int = flag(
        1,
        "Pipeline parallelism: cut the model's blocks into stages over this many workers, which "
        "pass on the micro-batches of --accumulate, by the model's plan (docs/parallel.md).",
        minimum=1,
    )
    pp_schedule: Literal["1f1b", "gpipe", "interleaved"] | None = flag(
        None,
        "The order of a pipeline's micro-batches: 1f1b keeps few activations; gpipe runs all "
        "forward passes first; interleaved gives each worker two stages, and so waits less. "
        "Unset: 1f1b.",
    )


@dataclasses.dataclass(frozen=True)
class ModelAndDataFlags:
    """Choose what is trained, and on what."""

    model: str = flag(
        "resnet50",
        "A model's name, FAMILY:NAME such as timm:vit_small_patch16_224, or "
        "package.module:attribute: a callable, called with num_classes, or a spec with a loss "
        "of its own.",
        of_scripts=False,
    )
    image_size: int = flag(
        224,
        "Height and width of the images the model sees, in pixels.",
        minimum=1,
        of_scripts=False,
    )
    seq_len: int = flag(
        128,
        "Tokens per sample, for text models and --data tokens.",
        minimum=1,
        of_scripts=False,
    )
    script: str | None = flag(
        None,
        "Your own script that calls `accbench.accelerate`; each worker runs it. What the script "
        "decides, from the model to the learning rate, then has no flag.",
        is_path=True,
    )
    script_args: str = flag(
        "",
        "The script's arguments, in one string, quoted as in a shell.",
    )
    data: str = flag(
        "mock",
        "NAME, NAME:LOCATION or a URL: mock, synthetic, imagefolder:DIR, recordio:FILE.rec or "
        "recordio:DIR, s3://BUCKET/PREFIX, tokens:FILE_OR_DIR, coco:DIR.",
        of_scripts=False,
        is_path=True,
    )
    batch_size: int | None = flag(
        None,
        "Samples per worker and step. Unset: 128 on an accelerator, 8 on a CPU.",
        minimum=1,
    )
    label_smoothing: float = flag(
        0.0,
        "Fraction of each label that is spread over all classes.",
        minimum=0,
        maximum=1,
        of_scripts=False,
    )
    mixup: float = flag(
        0.0,
        "Mix pairs of images, in proportions drawn from Beta(mixup, mixup). 0: no mixing.",
        minimum=0,
        maximum=1000000.0,
        of_scripts=False,
    )
    cutmix: float = flag(
        0.0,
        "Paste a part of one image into another; its area is drawn from Beta(cutmix, cutmix). With "
        "--mixup each batch gets one of the two. 0: no pasting.",
        minimum=0,
        maximum=1000000.0,
        of_scripts=False,
    )
    seed: int = flag(
        0,
        "Seed of the weights, the order of the data and the augmentation.",
        maximum=2**62,
    )
    workers: int | None = flag(
        None,
        "Data loading processes per worker. Unset: cores / workers, at most 8.",
        minimum=0,
        of_scripts=False,
    )
    max_bad_samples: int = flag(
        0,
        "Unreadable samples that a worker may skip before the run ends with an error.",
        minimum=0,
        of_scripts=False,
    )


@dataclasses.dataclass(frozen=True)
class StepFlags:
    """Set how long a run is, and when it is measured and evaluated."""

    epochs: int = flag(
        1,
        "Passes over the data; the run ends here or at --max_steps, whichever is first.",
        minimum=1,
        of_scripts=False,
    )
    max_steps: int | None = flag(None, "Optimizer steps after which the run ends.", minimum=1)
    warmup_steps: int = flag(
        5,
        "Steps of the first window, which includes compilation and counts in no speed.",
        minimum=1,
    )
    log_interval: int = flag(
        10,
        "Steps of every other window; the host waits for the device only at a window's end.",
        minimum=1,
    )
    eval_interval: int = flag(
        1,
        "Epochs between evaluations; 0 never evaluates.",
        minimum=0,
        of_scripts=False,
    )
    accumulate: int = flag(
        1,
        "Micro-batches that a worker splits each step's batch into, to save memory; their "
        "gradients are averaged.",
        minimum=1,
        of_scripts=False,
    )


@dataclasses.dataclass(frozen=True)
class OptimizerFlags:
    """The optimizer, and its learning rate."""

    optimizer: str = flag(
        "adamw",
        "The optimizer: adamw, sgd, or another file's name in accbench/engines/optimizers; torch's "
        "fused version, and under XLA one that never waits for the host.",
        of_scripts=False,
    )
    lr: float = flag(
        0.001,
        "The learning rate.",
        minimum=0,
        maximum=sys.float_info.max,
        of_scripts=False,
    )
    lr_schedule: Literal["constant", "cosine", "linear", "step"] = flag(
        "constant",
        "How the learning rate changes after its warm-up, a step at a time.",
        of_scripts=False,
    )
    lr_warmup_epochs: float = flag(
        0.0,
        "Epochs in which the learning rate grows from nearly 0 to --lr.",
        minimum=0,
        maximum=1000000000.0,
        of_scripts=False,
    )
    lr_final: float = flag(
        0.0,
        "For cosine and linear: the fraction of --lr at the end.",
        minimum=0,
        maximum=1000000000.0,
        of_scripts=False,
    )
    lr_step_epochs: float = flag(
        30.0,
        "For step: epochs between two cuts.",
        minimum=1e-06,
        maximum=1000000000.0,
        of_scripts=False,
    )
    lr_step_factor: float = flag(
        0.1,
        "For step: the factor by which each cut multiplies the learning rate.",
        minimum=0,
        maximum=1000000000.0,
        of_scripts=False,
    )
    weight_decay: float = flag(
        0.01,
        "AdamW's decoupled decay; SGD's L2 penalty.",
        minimum=0,
        maximum=sys.float_info.max,
        of_scripts=False,
    )
    decay: Literal["all", "matrices"] = flag(
        "all",
        "Which parameters decay: matrices excludes parameters of one dimension, norms and biases.",
        of_scripts=False,
    )
    momentum: float = flag(
        0.9, "Momentum of --optimizer sgd.", minimum=0, maximum=1, of_scripts=False
    )
    nesterov: bool = flag(False, "Nesterov momentum, for --optimizer sgd.", of_scripts=False)
    clip_norm: float | None = flag(
        None,
        "Scale the gradients of all parameters together down to this L2 norm, if they exceed it.",
        minimum=1e-12,
        maximum=sys.float_info.max,
        of_scripts=False,
    )
    ema_decay: float = flag(
        0.0,
        "Keep an exponential moving average of the weights, and evaluate and export it too: 0.999 "
        "moves it a thousandth of the way in each step. 0: none.",
        minimum=0,
        maximum=1,
        of_scripts=False,
    )


@dataclasses.dataclass(frozen=True)
class FaultFlags:
    """Set what is saved, and what happens when something fails."""

    save_interval: int = flag(
        1,
        "Epochs between checkpoints; one more is written at the end, and when SIGTERM or Ctrl-C "
        "stops the run. 0: none.",
        minimum=0,
        of_scripts=False,
    )
    save_steps: int | None = flag(
        None,
        "Also write a checkpoint every this many optimizer steps.",
        minimum=1,
        of_scripts=False,
    )
    keep_checkpoints: int = flag(
        2,
        "How many of the newest checkpoints stay; the one with the best top-1, or else the lowest "
        "loss, stays as well.",
        minimum=1,
        of_scripts=False,
    )
    on_save_error: Literal["stop", "continue"] = flag(
        "stop",
        "What to do when a checkpoint cannot be written, for example because the disk is full.",
        of_scripts=False,
    )
    resume: str | None = flag(
        None,
        "Resume from a checkpoint: auto is the newest complete one in --output_dir; or name the "
        "folder of a run or of a checkpoint.",
        of_scripts=False,
        is_path=True,
    )
    on_nan: Literal["stop", "skip", "rollback"] = flag(
        "stop",
        "What to do when the loss is NaN or infinite, or the loss scale has fallen to almost 0: "
        "skip leaves out steps whose gradients are NaN or infinite; rollback loads the weights of "
        "the newest checkpoint and goes on after the data that caused it.",
        of_scripts=False,
    )
    max_rollbacks: int = flag(
        3,
        "For --on_nan rollback: how often, before the run ends with the error.",
        minimum=0,
        of_scripts=False,
    )
    max_skips: int = flag(
        3,
        "For --on_nan skip: how many steps since the start, or the last resume, before the run "
        "ends with the error.",
        minimum=0,
        of_scripts=False,
    )
    on_oom: Literal["stop", "halve"] = flag(
        "stop",
        "What to do when memory runs out: halve starts again with half the batch size.",
        of_scripts=False,
    )


@dataclasses.dataclass(frozen=True)
class OutputFlags:
    """Set what a run writes, and where its flags come from."""

    output_dir: str | None = flag(
        None,
        "The run's folder. Unset: runs/<time>-<engine>-<model>.",
        is_path=True,
    )
    tensorboard: Literal["auto", "on", "off"] = flag(
        "auto",
        "Write scalars and some training images for TensorBoard. auto: where it is installed.",
    )
    profile: int | None = flag(
        None,
        "Trace this many steps for Perfetto, after the first window that follows the warm-up.",
        minimum=1,
        of_scripts=False,
    )
    config: str | None = flag(
        None,
        "A YAML file with any of these flags; flags on the command line win.",
        is_path=True,
    )


# In the order of `--help`.
GROUPS: Mapping[str, type] = {
    "workers and devices": WorkerFlags,
    "engine and precision": EngineFlags,
    "mesh": MeshFlags,
    "model and data": ModelAndDataFlags,
    "steps": StepFlags,
    "optimizer and schedule": OptimizerFlags,
    "checkpoints and faults": FaultFlags,
    "output": OutputFlags,
}


@dataclasses.dataclass(frozen=True)
class TaskConfig(
    OutputFlags,
    FaultFlags,
    OptimizerFlags,
    StepFlags,
    ModelAndDataFlags,
    MeshFlags,
    EngineFlags,
    WorkerFlags,
):
    """Train a model on this machine, one worker a device, and record how it went.

    Options of a single engine or data source are listed below it by name,
    as in `--ddp.no-channels-last`.
    """

    options: Annotated[Mapping[str, Any], tyro.conf.Suppress] = dataclasses.field(
        default_factory=dict
    )
    """Plug-in name -> its Options, for those that this task uses."""

    @property
    def run_dir(self) -> Path:
        """The run's folder; only after `resolve`."""
        assert self.output_dir is not None
        return Path(self.output_dir)


SCRIPTS_OWN = names_with(TaskConfig, of_scripts=False)
"""Flags whose values a script decides itself, or that mean nothing for it."""


def amp_level(task: TaskConfig) -> Literal["O0", "O1"]:
    """Return the task's level of mixed precision, O0 or O1, also where none was given."""
    is_mixed = task.script is None or task.amp_dtype is not None
    return task.amp_level or ("O1" if is_mixed else "O0")


def devices_per_worker(task: TaskConfig) -> int:
    """Return over how many devices each worker shares its batch (`--ddp.data_parallel`)."""
    options = task.options.get(task.engine)
    return getattr(options, "data_parallel", 1)


def makes_batches_between_steps(device: str | None, workers: int | None) -> bool:
    """Return whether batches are made between the steps, rather than beside them.

    On a CPU without loading processes: a thread that makes them beside the step would take a
    processor from one of torch's threads, for which the others wait at each operation.
    """
    return device == "cpu" and workers == 0


def data_name(data: str) -> tuple[str, str | None]:
    """Split `--data` into (source, location): NAME, NAME:LOCATION, or a URL, which is both."""
    if "://" in data:
        return data.split("://", 1)[0], data
    name, _, location = data.partition(":")
    return name, location or None


def as_mapping(task: TaskConfig) -> dict[str, Any]:
    """Return the task as plain values, as `config.json` and run records hold them.

    `--config` reads them.
    """
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
