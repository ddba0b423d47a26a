"""The numbers of a run that people compare, from its records."""

import dataclasses
from pathlib import Path

from accbench import config
from accbench.errors import RequestError
from accbench.pjrt import gpu
from accbench.recording import records
from accbench.report import run as runs


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """The numbers of one run. None: not known, because the run did not get that far."""

    name: str
    engine: str
    model: str
    device: str
    world_size: int
    devices_per_worker: int
    batch_size: int
    amp: str
    status: str
    unit: str
    """The unit that the model counts; samples where those are images."""
    units_per_sample: int
    samples_per_s: float | None
    """Samples of all ranks over the wall seconds of the windows after the warm-up."""
    step_ms: float | None
    """Wall milliseconds a step, over the same windows."""
    data_wait_share: float | None
    """Part of that wall time in which the loop waited for a batch, 0..1."""
    time_to_first_step_s: float | None
    compile_s: float | None
    tflop_per_s: float | None
    """10^12 operations of products a second, forward and backward, all ranks."""
    peak_share: float | None
    """Share of the devices' peak in the run's type, 0..1, where that is known."""
    num_recompiles: int | None
    num_fallbacks: int | None
    peak_memory_bytes: int | None
    """After the warm-up, or in all where there is nothing after it."""
    warmup_peak_memory_bytes: int | None
    """With the warm-up, where kernels are chosen."""
    last_loss: float | None
    error: str | None


def summarize_run(path: Path) -> RunSummary:
    """Summarize a run by its folder or its records file.

    Raises:
        RequestError: there are no records of a run.
    """
    file = path / config.RECORDS_FILE if path.is_dir() else path
    return summarize_records(file.parent.name, records.read(file))


def summarize_records(name: str, run_records: list[records.Record]) -> RunSummary:
    """Summarize a run's records.

    Raises:
        RequestError: there is no run among them.
    """
    recorded = runs.run_from_records(name, run_records)
    run, end = recorded.header, recorded.end
    if run is None:
        why = f" ({end.error})" if end and end.error else ""
        raise RequestError(f"{name} ended before it began to train{why}")
    windows, steady = recorded.windows, recorded.steady
    wall_s = sum(window.wall_s for window in steady)
    samples_per_s = sum(window.num_samples for window in steady) / wall_s if steady else None
    flops = end.flops_per_sample if end else None
    tflop_per_s = samples_per_s * flops / 1e12 if samples_per_s and flops else None
    peak = gpu.dense_tflops_of(run.device_name, run.amp_dtype)
    return RunSummary(
        name=name,
        engine=run.engine,
        model=run.model,
        device=run.device_name,
        world_size=run.world_size,
        devices_per_worker=run.devices_per_worker,
        batch_size=run.batch_size,
        amp=f"{run.amp_level} {run.amp_dtype}" if run.amp_dtype else run.amp_level,
        status=end.status if end else "killed",
        unit=run.counted[0],
        units_per_sample=run.counted[1],
        samples_per_s=samples_per_s,
        tflop_per_s=tflop_per_s,
        peak_share=tflop_per_s / (peak * run.num_devices) if tflop_per_s and peak else None,
        step_ms=1e3 * wall_s / sum(window.num_steps for window in steady) if steady else None,
        data_wait_share=sum(window.data_wait_s for window in steady) / wall_s if steady else None,
        time_to_first_step_s=end.time_to_first_step_s if end else None,
        compile_s=end.compile_s if end else None,
        num_recompiles=end.num_recompiles if end else None,
        num_fallbacks=end.num_fallbacks if end else None,
        peak_memory_bytes=recorded.peak_memory_bytes,
        warmup_peak_memory_bytes=recorded.warmup_peak_memory_bytes,
        last_loss=windows[-1].loss if windows else None,
        error=end.error if end else None,
    )
