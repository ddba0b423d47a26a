"""One run's records, sorted by kind, with the few rates that everything else starts from."""

import dataclasses
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from accbench import config
from accbench.errors import RequestError
from accbench.recording import records

R = TypeVar("R", bound=records.Record)


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """The records of one run. What the run did not get to is None or empty."""

    name: str
    header: records.RunRecord | None = None
    windows: tuple[records.WindowRecord, ...] = ()
    """The windows of all processes of a run that was resumed."""
    evaluations: tuple[records.EvalRecord, ...] = ()
    end: records.EndRecord | None = None
    device: records.DeviceRecord | None = None
    numerics: tuple[records.NumericsRecord, ...] = ()
    timed: tuple[records.WindowRecord, ...] | None = None
    """The windows that tell the speed of `header`'s setting; None: all."""

    @property
    def status(self) -> str:
        """The end record's status; `killed` without one, `not run` without any record."""
        if self.end is not None:
            return self.end.status
        return "killed" if self.header else "not run"

    @property
    def steady(self) -> tuple[records.WindowRecord, ...]:
        """The windows after the warm-up."""
        timed = self.windows if self.timed is None else self.timed
        return tuple(window for window in timed if not window.warmup)

    @property
    def samples_per_s(self) -> float | None:
        """Samples of all ranks over the wall seconds of the steady windows."""
        return self._per_wall(sum(window.num_samples for window in self.steady))

    @property
    def median_samples_per_s(self) -> float | None:
        """The median of the steady windows' speeds, so that a stall costs no more than it lasts."""
        speeds = self.speed_of_windows.values()
        return statistics.median(speeds) if speeds else None

    @property
    def speed_of_windows(self) -> dict[int, float]:
        """The samples/s of the steady windows: first step -> speed.

        Windows of less than half the steps of the longest one are left out.
        """
        longest = max((window.num_steps for window in self.steady), default=0)
        return {
            window.first_step: window.num_samples / window.wall_s
            for window in self.steady
            if window.wall_s > 0 and 2 * window.num_steps >= longest
        }

    @property
    def counted(self) -> tuple[str, int]:
        """The unit that speed is told in, and units a sample; see `RunRecord.counted`."""
        return self.header.counted if self.header else ("samples", 1)

    @property
    def steps_per_s(self) -> float | None:
        """Steps over the wall seconds of the steady windows."""
        return self._per_wall(sum(window.num_steps for window in self.steady))

    @property
    def data_wait_share(self) -> float | None:
        """Part of the steady wall time in which the loop waited for a batch, 0..1."""
        return self._per_wall(sum(window.data_wait_s for window in self.steady))

    @property
    def dispatch_share(self) -> float | None:
        """Part of the steady wall time in which the host traced or ran steps, 0..1."""
        return self._per_wall(sum(window.dispatch_s for window in self.steady))

    @property
    def duration_s(self) -> float:
        """Seconds from the launcher's start to its end, or as much of it as is known.

        The turns of a comparison's other rows are left out.
        """
        if self.device is not None:
            waited_s = self.end.waited_s if self.end else None
            return self.device.wall_s - (waited_s or 0.0)
        start_s = self.end.time_to_first_step_s if self.end else None
        return (start_s or 0.0) + sum(window.wall_s for window in self.windows)

    @property
    def other_cpu_share(self) -> float | None:
        """Share of the processors' time that others took during the run, 0..1.

        Of a run that waited for other rows' turns, which the launcher takes for others, during its
        measured windows.
        """
        if self.end is None or not self.end.waited_s:
            return self.device.other_cpu_share if self.device else None
        shares = [(w.other_cpu_share, w.wall_s) for w in self.steady]
        known = [(share, wall_s) for share, wall_s in shares if share is not None]
        total_s = sum(wall_s for _, wall_s in known)
        return sum(share * wall_s for share, wall_s in known) / total_s if total_s else None

    @property
    def peak_memory_bytes(self) -> int | None:
        """The largest peak of any rank after the warm-up; with it where nothing follows it."""
        windows = self.steady or self.windows
        return max((window.peak_memory_bytes for window in windows), default=None)

    @property
    def warmup_peak_memory_bytes(self) -> int | None:
        """The largest peak of any rank, the warm-up included."""
        return max((window.peak_memory_bytes for window in self.windows), default=None)

    @property
    def sm_clock_mhz(self) -> float | None:
        """The SM clock of the slowest NVIDIA device."""
        return self.device.sm_clock_mhz if self.device else None

    @property
    def throttled_share(self) -> float | None:
        """Part of the time in which heat or power held a clock down, 0..1."""
        return self.device.throttled_share if self.device else None

    @property
    def power_w(self) -> float | None:
        """The power of all devices together, in watts."""
        return self.device.power_w if self.device else None

    @property
    def joules_per_1000_samples(self) -> float | None:
        """The energy of the devices alone."""
        if self.power_w is None or not self.samples_per_s:
            return None
        return 1000 * self.power_w / self.samples_per_s

    def _per_wall(self, amount: float) -> float | None:
        wall_s = sum(window.wall_s for window in self.steady)
        return amount / wall_s if wall_s > 0 else None

    @staticmethod
    def _size(run: records.RunRecord) -> dict[str, Any]:
        unit, number = run.counted
        if number == 1:
            return {"image size": run.task.get("image_size")}
        return {f"{unit} a sample": number}

    def setting(self) -> dict[str, Any]:
        """Return what must be the same in two runs for their speeds to be compared."""
        assert self.header is not None
        run = self.header
        launcher = run.task.get("launcher", config.TaskConfig.launcher)
        return {
            "machine": run.hostname,
            **({} if launcher == config.TaskConfig.launcher else {"launcher": launcher}),
            "device": f"{run.num_devices} x {run.device_name}",
            "model": run.model,
            **self._size(run),
            "dtype": run.amp_dtype or "float32",
            "global batch": run.num_data_ranks * run.batch_size,
        }


def counted(runs: Iterable[RecordedRun]) -> tuple[str, int]:
    """Return the unit that these runs are counted in, and units a sample.

    Runs that differ are counted in samples; see `RunRecord.counted`.
    """
    units = {run.counted for run in runs if run.header}
    return units.pop() if len(units) == 1 else ("samples", 1)


def run_from_records(name: str, run_records: list[records.Record]) -> RecordedRun:
    """Sort a run's records by kind."""

    def of_kind(kind: type[R]) -> tuple[R, ...]:
        return tuple(record for record in run_records if isinstance(record, kind))

    def last(kind: type[R]) -> R | None:
        return next(reversed(of_kind(kind)), None)

    return RecordedRun(
        name=name,
        header=last(records.RunRecord),
        windows=of_kind(records.WindowRecord),
        evaluations=of_kind(records.EvalRecord),
        timed=_timed(run_records),
        end=last(records.EndRecord),
        device=last(records.DeviceRecord),
        numerics=of_kind(records.NumericsRecord),
    )


def _timed(run_records: list[records.Record]) -> tuple[records.WindowRecord, ...]:
    """Return the windows of the processes that ran as the last one did.

    A resumed run may have changed its setting.
    """
    timed: list[records.WindowRecord] = []
    setting = None
    for record in run_records:
        if isinstance(record, records.RunRecord):
            record_setting = (record.engine, *RecordedRun("", record).setting().values())
            timed, setting = timed if record_setting == setting else [], record_setting
        elif isinstance(record, records.WindowRecord):
            timed.append(record)
    return tuple(timed)


def read(path: Path) -> RecordedRun:
    """Read a run by its folder or its records file.

    Raises:
        RequestError: there are no records.
    """
    file = path / config.RECORDS_FILE if path.is_dir() else path
    return run_from_records(file.parent.name, records.read(file))


def read_if_there(path: Path) -> RecordedRun:
    """Read a run as `read` does; a run that left no records has status `not run`."""
    try:
        return read(path)
    except RequestError:
        return RecordedRun(path.name)
