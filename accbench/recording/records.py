"""A run's records: one JSON object a line in `records.jsonl`.

They hold raw counts and seconds only. `accbench.report` derives rates, ratios and verdicts.
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
    """The first line of a run: its task, engine, devices and software."""

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
    """The engine's compiler: inductor or xla; None if the engine is eager."""
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    """Rank 0's environment variables that may change its speed."""
    hosts: list[str] | None = None
    """Machines by rank; rank 0's is `hostname`."""
    num_classes: int | None = None
    """Classes of the data, and so the width of the model's last layer."""
    unit: str = "samples"
    """The unit that the model counts, in the plural: images, tokens."""
    units_per_sample: int = 1
    mesh: dict[str, int] | None = None
    """Ranks along each axis, the outermost first; None in records from before it was stored."""
    devices_per_worker: int = 1
    """Devices over which each worker shares its batch."""
    schema_version: int = SCHEMA_VERSION

    @property
    def num_data_ranks(self) -> int:
        """Workers that have a batch of their own."""
        return self.world_size if self.mesh is None else self.mesh["replicate"] * self.mesh["shard"]

    @property
    def num_devices(self) -> int:
        """Devices of all workers."""
        return self.world_size * self.devices_per_worker

    @property
    def counted(self) -> tuple[str, int]:
        """The unit that speed is told in, and units a sample; images count as samples."""
        if self.unit == "images":
            return "samples", 1
        return self.unit, self.units_per_sample


@dataclasses.dataclass(frozen=True)
class WindowRecord:
    """The steps between two points at which the host waited for the device."""

    kind: ClassVar[str] = "window"
    epoch: int
    first_step: int
    """Counted from 0 over the run."""
    num_steps: int
    num_samples: int
    """Samples of all ranks."""
    wall_s: float
    """Seconds on rank 0's clock, from the end of the window before."""
    data_wait_s: float
    """Seconds in which the loop waited for a batch; mean over ranks."""
    dispatch_s: float
    """Seconds in which the host traced or ran steps, mean over ranks.

    In the rest of the wall time, without this and the data wait, the host waited for the device."""
    loss: float | None
    """Mean over ranks at the window's last step; None where it was not finite."""
    peak_memory_bytes: int
    """The largest of any rank by the allocator in use: since the start in the warm-up, later since
    the warm-up, where the device can forget its peak."""
    num_compiles: int
    """Graphs that this rank compiled in the window."""
    warmup: bool
    """True for the first window of a run, which holds compilation."""
    mean_loss: float | None = None
    """Mean over ranks and the window's steps; None where it was not finite."""
    lr: float | None = None
    """The learning rate of its last step."""
    other_cpu_share: float | None = None
    """Share of the processors' time that others took, 0..1.

    This and the fields below are those of the machine with the largest, since the last window that
    has them: shorter windows than half a second are not sampled one by one."""
    stolen_cpu_share: float | None = None
    """Share of the processors' time that the hypervisor gave to other machines, 0..1."""
    throttled_cpu_share: float | None = None
    """Share of the processors' time held back by heat or by the container's limit, 0..1."""
    swapped_in_bytes: int | None = None
    """Memory that had to be read back from swap space, of all programs."""
    sampled_s: float | None = None
    """Seconds since the last window that has these fields; None in records of before."""


@dataclasses.dataclass(frozen=True)
class EvalRecord:
    """One pass over the validation set, every sample once."""

    kind: ClassVar[str] = "eval"
    epoch: int
    loss: float | None
    top1: float | None
    """Fraction in 0..1; None where the model has no classes to rank."""
    top5: float | None
    num_samples: int
    """The number that the scores are means over: samples, or tokens of a language model."""
    averaged: bool = False
    """Whether the moving average of the weights was evaluated instead of the weights."""


@dataclasses.dataclass(frozen=True)
class EndRecord:
    """The end of a run. A run without this line was killed together with its launcher.

    A field is None where the worker that knew it is gone.
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
    state_bytes: int | None = None
    """Bytes of parameters and optimizer state that rank 0 keeps between steps."""
    offloaded_bytes: int | None = None
    """Those of them that `--offload` keeps in host memory."""
    flops_per_sample: float | None = None
    """Floating point operations of products in a sample's forward and backward pass."""
    shape_changes: list[str] | None = None
    """Inputs of a step whose shape changed, where one did."""
    num_graphs: float | None = None
    """Compiled graphs that a training step after the warm-up executes; 0 where eager."""
    num_fallbacks: int | None = None
    """Operations in training steps that left the compiler."""
    left_compiler: list[str] | None = None
    """Those operations, and where in the model they are, as far as known."""
    skipped_steps: int | None = None
    """Optimizer steps left out because a float16 gradient overflowed."""
    num_steps: int = 0
    num_samples: int = 0
    num_bad_samples: int | None = None
    """Samples that could not be read and were replaced, over all ranks."""
    samples_per_epoch: int | None = None
    """Samples of all ranks in one pass over the data."""
    waited_s: float | None = None
    """Seconds between windows in which a comparison's other rows had their turns."""


@dataclasses.dataclass(frozen=True)
class CheckpointRecord:
    """A checkpoint that is on the disk."""

    kind: ClassVar[str] = "checkpoint"
    step: int
    """Optimizer steps done at the checkpoint."""
    epoch: int
    """The epoch to resume with."""
    path: str
    num_bytes: int
    stall_s: float
    """Seconds for which training stood still."""
    write_s: float
    """Seconds of the thread that wrote it, while training went on."""


@dataclasses.dataclass(frozen=True)
class ResumeRecord:
    """A process that resumes from a checkpoint. What was done after that step is void."""

    kind: ClassVar[str] = "resume"
    step: int
    """Optimizer steps done."""
    epoch: int
    """The epoch that the process resumes with."""
    checkpoint: str | None
    """Its folder; None where there was none yet, and training starts from the beginning."""
    rolled_back: bool = False
    """Whether the same process returned to it, because the loss was not finite."""


@dataclasses.dataclass(frozen=True)
class ParamsRecord:
    """Settings that a user's script noted with `log_params`."""

    kind: ClassVar[str] = "params"
    params: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class MetricsRecord:
    """Numbers that a user's script noted with `log_metrics`."""

    kind: ClassVar[str] = "metrics"
    metrics: dict[str, float | None]
    step: int | None


@dataclasses.dataclass(frozen=True)
class NumericsRecord:
    """One part of a numerics pass: what was compared with the reference, and its distances."""

    kind: ClassVar[str] = "numerics"
    phase: str
    """The part of the pass.

    start, step (from the reference's state), evaluation, overflow, free, free end, own dropout,
    not loadable; without dropout, where nothing is dropped; reference, which has a loss alone;
    script, whose pass has fewer parts. Plain ddp also has noise, and noise of evaluation, free,
    free end: the same from weights that are off by some roundings. kept: an earlier comparison
    made the pass."""
    step: int
    """Steps done."""
    distances: dict[str, float]
    """Quantity -> distance from the reference, the largest of any rank.

    `accbench.comparing.distances` measures it."""
    loss: float | None = None
    """Mean over ranks; None where there is none or it was not finite."""
    ranks_apart: int = 0
    """Parameters that are not bitwise equal on all ranks."""
    note: str | None = None
    """What the numbers do not say."""


@dataclasses.dataclass(frozen=True)
class DeviceRecord:
    """What was observed of the machine from outside while a run went on."""

    kind: ClassVar[str] = "device"
    wall_s: float
    other_cpu_share: float | None = None
    """Share of this machine's processor time that went to other processes, 0..1."""
    throttled_share: float | None = None
    """Share of the samples in which heat or power held a clock down, 0..1."""
    other_device_processes: int | None = None
    """Processes on the devices before the run began."""
    sm_clock_mhz: float | None = None
    """Median over the samples, of the slowest device."""
    power_w: float | None = None
    """Median over the last half of the samples, all devices together."""


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
    """Return `value`, or None for NaN and infinities, which JSON does not have."""
    return value if math.isfinite(value) else None


def _is_repeated(record: Record, resumed: ResumeRecord) -> bool:
    """Return whether a resumed run repeats what this record is about."""
    if isinstance(record, WindowRecord):
        return record.first_step + record.num_steps > resumed.step
    if isinstance(record, EvalRecord):
        return record.epoch >= resumed.epoch
    if isinstance(record, CheckpointRecord | ResumeRecord):
        return record.step > resumed.step
    return isinstance(record, EndRecord)


def append(path: Path, record: Record) -> None:
    """Append one line; it is with the operating system when this returns.

    A line that a killed writer left unfinished is closed first, so that it
    spoils nothing but itself.

    Raises:
        RequestError: the line cannot be written, for example because the disk is full.
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
    """Append the end record that failed workers could not write.

    Its steps and samples are those of the recorded windows.

    Raises:
        RequestError: the record cannot be written.
    """
    try:
        earlier = read(path)
    except RequestError:  # it failed before the first record
        earlier = []
    windows = [record for record in earlier if isinstance(record, WindowRecord)]
    num_steps = sum(window.num_steps for window in windows)
    num_samples = sum(window.num_samples for window in windows)
    append(path, EndRecord(status, error, num_steps=num_steps, num_samples=num_samples))


def is_interrupted(path: Path) -> bool:
    """Return whether a run's record ends with being asked to stop."""
    try:
        run_records = read(path)
    except RequestError:
        return False
    return (
        bool(run_records)
        and isinstance(run_records[-1], EndRecord)
        and run_records[-1].status == "interrupted"
    )


def read(path: Path) -> list[Record]:
    """Read all valid records of a file, in order.

    A line cut off by a kill is skipped, and so are fields of a newer schema. Where a run was
    resumed, records of what it did before and then repeated are left out.

    Raises:
        RequestError: there is no such file, or it does not hold accbench's records.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}") from None
    valid: list[Record] = []
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
            valid = [earlier for earlier in valid if not _is_repeated(earlier, record)]
        valid.append(record)
    if not valid:
        raise RequestError(f"{path} holds no record of a run")
    return valid
