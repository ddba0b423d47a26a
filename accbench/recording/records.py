"""A run's records: one JSON object a line in `records.jsonl`.

Raw counts and seconds only. Rates, ratios and verdicts are derived from them in
`accbench.report`.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, ClassVar

from accbench.errors import RequestError

SCHEMA_VERSION = 1


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """What ran, on what. The first line."""

    kind: ClassVar[str] = "run"
    task: dict[str, Any]
    engine: str
    model: str
    world_size: int
    batch_size: int
    """Samples a worker and step."""
    amp_level: str
    amp_dtype: str | None
    """None under O0."""
    device_type: str
    device_name: str
    collectives: str
    """Where gradients are reduced: in_graph, process_group or host."""
    compile_cache: str
    """The persistent compile cache's folder, or `off: ` and the reason."""
    num_threads: int
    versions: dict[str, str]
    commit: str | None
    hostname: str
    started_at: str
    """ISO 8601, UTC."""
    compiler: str | None = None
    """What the engine is meant to compile with: inductor, xla; None if it is eager."""
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    """Rank 0's environment variables that may change its speed."""
    hosts: list[str] | None = None
    """Machines by rank; rank 0's is `hostname`."""
    num_classes: int | None = None
    """Of the data, and so the width of the model's last layer."""
    unit: str = "samples"
    """What the model counts, in the plural: images, tokens."""
    units_per_sample: int = 1
    schema_version: int = SCHEMA_VERSION

    @property
    def counted(self) -> tuple[str, int]:
        """What speed is told in, and how many of them a sample has; images are samples."""
        if self.unit == "images":
            return "samples", 1
        return self.unit, self.units_per_sample


@dataclasses.dataclass(frozen=True)
class WindowRecord:
    """Steps between two points at which the host waited for the device."""

    kind: ClassVar[str] = "window"
    epoch: int
    first_step: int
    """Counted from 0 over the run."""
    num_steps: int
    num_samples: int
    """Of all ranks."""
    wall_s: float
    """On rank 0's clock, from the end of the window before."""
    data_wait_s: float
    """Seconds in which the loop waited for a batch; mean over ranks."""
    dispatch_s: float
    """Seconds in which the host traced or ran steps, mean over ranks; in what is left of
    the wall after this and the data wait, the host waited for the device."""
    loss: float | None
    """Mean over ranks at the window's last step; None where it was not finite."""
    peak_memory_bytes: int
    """Since the start, the largest of any rank, by the allocator in use."""
    num_compiles: int
    """Graphs that this rank compiled in the window."""
    warmup: bool
    """True for the first window of a run, which holds compilation."""
    mean_loss: float | None = None
    """Mean over ranks and the window's steps; None where it was not finite."""
    lr: float | None = None
    """The learning rate of its last step."""


@dataclasses.dataclass(frozen=True)
class EvalRecord:
    """One pass over the validation set, every sample once."""

    kind: ClassVar[str] = "eval"
    epoch: int
    loss: float | None
    top1: float | None
    """Fraction in 0..1; None where the model has no such thing."""
    top5: float | None
    num_samples: int
    """What the scores are means over: samples, or tokens of a language model."""
    averaged: bool = False
    """Of the moving average of the weights, and not of the weights themselves."""


@dataclasses.dataclass(frozen=True)
class EndRecord:
    """How it ended. A run without this line was killed together with its launcher.

    What is None is not known, because the worker that knew is gone.
    """

    kind: ClassVar[str] = "end"
    status: str
    """ok, oom, nan, error or interrupted."""
    error: str | None = None
    time_to_first_step_s: float | None = None
    """From the worker's first line, imports included, to the first step's result."""
    compile_s: float | None = None
    num_compiles: int | None = None
    """Graphs compiled in the whole run, evaluation included."""
    num_recompiles: int | None = None
    """Graphs compiled in training windows after the warm-up."""
    flops_per_sample: float | None = None
    """Floating point operations of products in a sample's forward and backward pass."""
    shape_changes: list[str] | None = None
    """Inputs of a step that came in another shape, where one did."""
    num_graphs: float | None = None
    """Compiled graphs that a training step after the warm-up executes; 0 where eager."""
    num_fallbacks: int | None = None
    """Operations in training steps that left the compiler."""
    left_compiler: list[str] | None = None
    """Which of them, and where in the model, as far as that was found out."""
    skipped_steps: int | None = None
    """Optimizer steps left out because a float16 gradient overflowed."""
    num_steps: int = 0
    num_samples: int = 0
    num_bad_samples: int | None = None
    """Samples that could not be read and were replaced, over all ranks."""
    samples_per_epoch: int | None = None
    """Samples of all ranks in one pass over the data."""


@dataclasses.dataclass(frozen=True)
class CheckpointRecord:
    """A checkpoint that is on the disk."""

    kind: ClassVar[str] = "checkpoint"
    step: int
    """Optimizer steps that it holds."""
    epoch: int
    """The epoch to go on with."""
    path: str
    num_bytes: int
    stall_s: float
    """Seconds for which training stood still."""
    write_s: float
    """Seconds of the thread that wrote it, while training went on."""


@dataclasses.dataclass(frozen=True)
class ResumeRecord:
    """A process that goes on from a checkpoint. What was done after that is void."""

    kind: ClassVar[str] = "resume"
    step: int
    """Optimizer steps done."""
    epoch: int
    """The epoch that it goes on with."""
    checkpoint: str | None
    """Its folder; None where there was none yet, and training begins anew."""
    rolled_back: bool = False
    """Whether the same process went back to it, as the loss was not finite."""


@dataclasses.dataclass(frozen=True)
class ParamsRecord:
    """What a user's script noted with `log_params`."""

    kind: ClassVar[str] = "params"
    params: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class MetricsRecord:
    """What a user's script noted with `log_metrics`."""

    kind: ClassVar[str] = "metrics"
    metrics: dict[str, float | None]
    step: int | None


@dataclasses.dataclass(frozen=True)
class NumericsRecord:
    """A part of a numerics pass: what was compared with the reference, and how far off it is."""

    kind: ClassVar[str] = "numerics"
    phase: str
    """start, step (from the reference's state), evaluation, overflow, free, free end, own
    dropout, not loadable; reference, which has a loss alone; script, whose pass has fewer parts.
    Of plain ddp also noise, and noise of evaluation, free, free end: the same from weights that
    are off by some roundings."""
    step: int
    """Steps done."""
    distances: dict[str, float]
    """Quantity -> distance from the reference, the furthest of any rank, as
    `accbench.comparing.distances` measures it."""
    loss: float | None = None
    """Mean over ranks; None where there is none or it was not finite."""
    ranks_apart: int = 0
    """Parameters that are not the same on all ranks, to the last bit."""
    note: str | None = None
    """What numbers do not say."""


@dataclasses.dataclass(frozen=True)
class DeviceRecord:
    """What was seen of the machine from outside while a run went on."""

    kind: ClassVar[str] = "device"
    wall_s: float
    other_cpu_share: float | None = None
    """Part of this machine's processor time that went to other processes, 0..1."""
    throttled_share: float | None = None
    """Part of the looks at the devices that found a clock held down by heat or power."""
    other_device_processes: int | None = None
    """Processes on the devices before the run began."""
    sm_clock_mhz: float | None = None
    """Median over the looks, of the slowest device."""
    power_w: float | None = None
    """Median of the last half of the looks, all devices together."""


Record = (
    RunRecord
    | WindowRecord
    | EvalRecord
    | EndRecord
    | CheckpointRecord
    | ResumeRecord
    | ParamsRecord
    | MetricsRecord
    | NumericsRecord
    | DeviceRecord
)
_CLASSES: dict[str, Any] = {c.kind: c for c in Record.__args__}


def finite_or_none(value: float) -> float | None:
    """`value`, or None for NaN and infinities, which JSON does not have."""
    return value if math.isfinite(value) else None


def _void(record: Record, resumed: ResumeRecord) -> bool:
    """Whether a record is of something that a resumed run does again."""
    if isinstance(record, WindowRecord):
        return record.first_step + record.num_steps > resumed.step
    if isinstance(record, EvalRecord):
        return record.epoch >= resumed.epoch
    if isinstance(record, CheckpointRecord | ResumeRecord):
        return record.step > resumed.step
    return isinstance(record, EndRecord)


def append(path: Path, record: Record) -> None:
    """Add one line; it is with the operating system when this returns.

    A line that a killed writer left unfinished is closed first, so that it
    spoils nothing but itself.

    Raises:
        RequestError: it cannot be written, the disk being full for one.
    """
    line = json.dumps({"kind": record.kind, **dataclasses.asdict(record)}, allow_nan=False)
    try:
        with path.open("ab+") as file:
            file.seek(0, 2)
            if file.tell():
                file.seek(-1, 2)
                if file.read(1) != b"\n":
                    line = "\n" + line
            file.write(f"{line}\n".encode())
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}") from None


def append_failure(path: Path, status: str, error: str) -> None:
    """End a run's record whose workers could not: with what its windows tell.

    Raises:
        RequestError: it cannot be written.
    """
    try:
        found = read(path)
    except RequestError:  # it failed before the first record
        found = []
    windows = [record for record in found if isinstance(record, WindowRecord)]
    num_steps = sum(window.num_steps for window in windows)
    num_samples = sum(window.num_samples for window in windows)
    append(path, EndRecord(status, error, num_steps=num_steps, num_samples=num_samples))


def is_interrupted(path: Path) -> bool:
    """Whether a run's record ends with being asked to stop."""
    try:
        found = read(path)
    except RequestError:
        return False
    return bool(found) and isinstance(found[-1], EndRecord) and found[-1].status == "interrupted"


def read(path: Path) -> list[Record]:
    """All records of a file that count, in order.

    A line cut off by a kill is passed over. Fields of a newer schema are too. Where a run was
    resumed, what it did before and then did again is left out.

    Raises:
        RequestError: no such file, or it does not hold accbench's records.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}") from None
    found: list[Record] = []
    for line in lines:
        try:
            values = json.loads(line)
            record_class = _CLASSES.get(values.pop("kind"))
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
            continue
        if record_class is None:
            continue
        names = {f.name for f in dataclasses.fields(record_class)}
        try:
            record = record_class(**{k: v for k, v in values.items() if k in names})
        except TypeError:
            continue
        if isinstance(record, ResumeRecord):
            found = [other for other in found if not _void(other, record)]
        found.append(record)
    if not found:
        raise RequestError(f"{path} holds no record of a run")
    return found
