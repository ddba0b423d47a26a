"""A made-up comparison on disk: three engines, five rounds, everything in order."""

import dataclasses
from pathlib import Path

from accbench.recording import records
from accbench.report import comparison
from accbench.report.comparison import FLOORS, REFERENCE, ComparisonPlan, RowPlan

SPEED = {"ddp": 100.0, "inductor": 125.0, "xla": 50.0}  # samples/s
# What one round is faster than another; the same for all rows, so that ratios are steady.
DRIFT = (1.0, 1.02, 0.99, 1.01, 0.98)
WOBBLE = {"ddp": (0.0,) * 5, "inductor": (0.0, 0.01, -0.01, 0.005, -0.005), "xla": (0.01,) * 5}
# What a seed adds to the losses: a part in all windows, and another in each.
SEED_LOSS = (0.03, -0.02, 0.04, -0.05, 0.01)
ROUNDING = {"ddp": 0.0, "inductor": 1e-3, "xla": -2e-3}
COLD = {"ddp": 4.0, "inductor": 30.0, "xla": 40.0}  # seconds to the first step
WARM = {"ddp": 4.0, "inductor": 9.0, "xla": 40.0}


def plan(**changes: object) -> ComparisonPlan:
    rows = tuple(RowPlan(name, name, {"engine": name, "model": "net"}) for name in SPEED)
    made = ComparisonPlan(rows, "ddp", 5, 0.02, 3, True, price_per_hour=2.0, order_seed=7)
    return dataclasses.replace(made, **changes)


def header(engine: str, **changes: object) -> records.RunRecord:
    made = records.RunRecord(
        task={"engine": engine, "image_size": 64},
        engine=engine,
        model="net",
        world_size=2,
        batch_size=8,
        amp_level="O0",
        amp_dtype=None,
        device_type="cpu",
        device_name="a processor",
        collectives="process_group",
        compile_cache="off: none",
        num_threads=1,
        versions={"python": "3.11", "torch": "2.8.0"},
        commit="abc",
        hostname="here",
        started_at="2026-01-01T00:00:00+00:00",
        compiler=None if engine == "ddp" else engine,
    )
    return dataclasses.replace(made, **changes)


def window(first_step: int, samples_per_s: float, **changes: object) -> records.WindowRecord:
    num_samples = 10 * 16
    wall_s = num_samples / samples_per_s
    made = records.WindowRecord(
        epoch=0,
        first_step=first_step,
        num_steps=10,
        num_samples=num_samples,
        wall_s=wall_s,
        data_wait_s=0.02 * wall_s,
        dispatch_s=0.3 * wall_s,
        loss=2.0 - first_step / 50,
        peak_memory_bytes=500 * 2**20,
        num_compiles=0,
        warmup=first_step == 0,
    )
    return dataclasses.replace(made, **changes)


def end(engine: str, cold: bool, **changes: object) -> records.EndRecord:
    first_step_s = (COLD if cold else WARM)[engine]
    compiles = engine != "ddp"
    made = records.EndRecord(
        status="ok",
        time_to_first_step_s=first_step_s,
        compile_s=first_step_s - 5 if compiles else 0.0,
        num_compiles=int(compiles),
        num_recompiles=0,
        num_graphs=float(compiles),
        num_fallbacks=0,
        skipped_steps=0,
        num_steps=40,
        num_samples=640,
        num_bad_samples=0,
        samples_per_epoch=6400,
    )
    return dataclasses.replace(made, **changes)


def loss(engine: str, number: int, first_step: int) -> float:
    """Falls from 2 to 1.4; engines differ by far less than seeds do."""
    of_window = SEED_LOSS[(number + first_step // 10) % 5]
    rounding = ROUNDING[engine] * SEED_LOSS[(2 * number) % 5] * 10
    return 2.0 - first_step / 50 + SEED_LOSS[number - 1] + of_window + rounding


def run(engine: str, number: int) -> list[records.Record]:
    speed = SPEED[engine] * DRIFT[number - 1] * (1 + WOBBLE[engine][number - 1])
    head = header(engine)
    losses = {step: loss(engine, number, step) for step in (0, 10, 20, 30)}
    return [
        dataclasses.replace(head, task={**head.task, "seed": number - 1}),
        *(window(step, speed, loss=at, mean_loss=at) for step, at in losses.items()),
        end(engine, cold=number == 1),
        records.DeviceRecord(wall_s=20.0, other_cpu_share=0.01),
    ]


def numerics(engine: str, error: float, **changes: object) -> list[records.Record]:
    """Three steps in which everything is `error` off, and the same in the free run.

    Args:
        changes: of the second step's record.
    """
    step = {
        "loss": error, "applied steps": 0.0, "dropout calls": 0.0, "gradient": error,
        "gradient of w": error, "scale": error, "scale of w": -error, "update of w": error,
        "second moment of w": error, "buffer bn.running_mean": error,
    }  # fmt: skip
    found = [records.NumericsRecord("start", 0, {"tensors": 0.0, "state w": 0.0})]
    found += [records.NumericsRecord("step", n, step, loss_of(n, error)) for n in (1, 2, 3)]
    found[2] = dataclasses.replace(found[2], **changes)
    found += [records.NumericsRecord("evaluation", 3, {"loss": error})]
    found += [
        records.NumericsRecord("free", n, {"loss": error}, loss_of(n, error)) for n in (1, 2, 3)
    ]
    end = {"parameters": error, "way": -error, "applied steps": 0.0}
    found += [records.NumericsRecord("free end", 3, end)]
    return [header(engine), *found, records.EndRecord("ok", num_steps=3)]


def loss_of(step: int, error: float) -> float:
    return (2.0 - 0.1 * step) * (1 + error)


def reference(**changes: object) -> list[records.Record]:
    """The float64 run; `changes` are those of its first record."""
    found = [records.NumericsRecord("reference", n, {}, loss_of(n, 0.0)) for n in (1, 2, 3)]
    found[0] = dataclasses.replace(found[0], **changes)
    return [header("ddp"), *found, records.EndRecord("ok", num_steps=3)]


def write_run(folder: Path, found: list[records.Record]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "records.jsonl"
    path.unlink(missing_ok=True)
    for record in found:
        records.append(path, record)


def write(folder: Path, made: ComparisonPlan | None = None) -> Path:
    """The whole comparison; returns `folder`."""
    made = made or plan()
    folder.mkdir(parents=True, exist_ok=True)
    made.write(folder)
    for row in made.rows:
        for number in range(1, made.repeats + 1):
            write_run(comparison.round_folder(folder, number, row), run(row.folder, number))
        synthetic = [
            header(row.folder),
            *(window(step, 1.1 * SPEED[row.folder]) for step in (0, 10)),
            end(row.folder, cold=False),
        ]
        write_run(comparison.synthetic_folder(folder, row), synthetic)
        error = {"ddp": 1e-5, "inductor": 2e-5, "xla": 3e-5}[row.folder]
        write_run(comparison.numerics_folder(folder, row.folder), numerics(row.folder, error))
    write_run(comparison.numerics_folder(folder, REFERENCE), reference())
    for name, error in zip(FLOORS, (1e-5, 1.5e-5), strict=True):
        write_run(comparison.numerics_folder(folder, name), numerics("ddp", error))
    return folder
