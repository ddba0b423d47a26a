"""The jobs of a comparison, in order: its rounds, runs without input, and the numerics pass."""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from accbench import config, launchers
from accbench.comparing.order import round_orders
from accbench.comparing.run import JobKind
from accbench.config.task import MeshFlags
from accbench.distributed import mesh
from accbench.errors import RequestError
from accbench.report import comparison, numerics
from accbench.report import run as runs
from accbench.report.comparison import FLOORS, REFERENCE, ComparisonPlan, RowPlan

# Folder below the reference's run, see accbench.comparing.reference_files.
REFERENCE_TENSORS = "reference"


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of a comparison."""

    label: str
    row: RowPlan
    folder: Path
    task: dict[str, Any]
    number: int | None = None
    """The round, from 1; round 1 starts with empty compile caches. None if it is not timed."""
    kind: JobKind = "run"
    argument: str = ""
    """For a numerics pass: the number of the reference's ranks, or the reference's folder.

    For a copy: the folder of the pass to copy."""
    shared_by: tuple[str, ...] = ()
    """Names of the rows that a pass is for, if it is for several; empty: for its own row alone."""

    def is_needed(self, failed: Collection[str]) -> bool:
        """Return whether a row that it is for has not failed."""
        return not set(self.shared_by or (self.row.name,)) <= set(failed)


def in_order(plan: ComparisonPlan, folder: Path) -> Iterator[list[Job]]:
    """Yield all runs in order: the rounds, then those without input, then the numerics pass.

    The runs of a round come together, and so do passes of the numerics that do not wait for each
    other; others come one by one. The flags of a later run can depend on the record of an earlier
    one.
    """
    rows = [(row, with_cache(row, folder)) for row in plan.rows if row.task is not None]
    yield from _rounds(plan, rows, folder)
    with_input_round = rows_with_input_round(plan)
    for row, task in rows:
        if row.name in with_input_round:
            at = comparison.synthetic_folder(folder, row)
            yield [Job(f"synthetic data  {row.name}", row, at, _without_input(task, folder, row))]
    if plan.numerics_steps:
        yield from _numerics_jobs(plan, rows, folder)


def _rounds(
    plan: ComparisonPlan, rows: list[tuple[RowPlan, dict[str, Any]]], folder: Path
) -> Iterator[list[Job]]:
    for number, turn in enumerate(round_orders(rows, plan.most_rounds, plan.order_seed), start=1):
        needed = comparison.rounds_needed(plan, comparison.read_rows(plan, folder))
        if number > max(needed.values()):
            break
        round_jobs = []
        for row, task in turn:
            if number > needed[row.name]:
                continue  # decided; the round's order stays that of the rows left
            at = comparison.round_folder(folder, number, row)
            # Each round has a seed of its own, the same for all rows: the spread of losses between
            # seeds is the measure for differences between engines.
            seeded = {**task, "seed": task["seed"] + number - 1}
            total = plan.repeats if number <= plan.repeats else plan.most_rounds
            label = f"round {number}/{total}  {row.name}"
            round_jobs.append(Job(label, row, at, seeded, number))
        if round_jobs:
            yield round_jobs


def _without_input(task: dict[str, Any], folder: Path, row: RowPlan) -> dict[str, Any]:
    """Return the task on synthetic data, with as many classes as the row's first round had."""
    header = runs.read_if_there(comparison.round_folder(folder, 1, row)).header
    without = {**task, "data": "synthetic"}
    if header is None or header.num_classes is None:
        return without
    # With other classes the model's last layer would differ, and the engine would recompile.
    options = {**task.get("synthetic", {}), "num_classes": header.num_classes}
    return {**without, "synthetic": options}


def _numerics_jobs(
    plan: ComparisonPlan, rows: list[tuple[RowPlan, dict[str, Any]]], folder: Path
) -> Iterator[list[Job]]:
    """Yield the jobs of the references, of plain ddp in both layouts, and of every row."""
    row, task = rows[0]
    plain = plain_task(task)
    num_ranks = plain["nproc_per_node"] * int(plain["nnodes"])
    # Data loading processes would only add their start-up time to every pass.
    steps: dict[str, int | None] = {"max_steps": plan.numerics_steps}
    if "script" not in task:
        steps |= {"epochs": None, "workers": 0}
    plain |= steps
    reference = comparison.numerics_folder(folder, REFERENCE)
    threads = None if plain["threads"] is None else num_ranks * plain["threads"]
    exact = {**plain, "amp_level": "O0", "nproc_per_node": 1, "nnodes": "1", "threads": threads}
    if "script" in task:  # its loop sees only its own rank's samples
        exact |= {"nproc_per_node": num_ranks, "threads": plain["threads"]}
    is_here = (task["launcher"], task["nnodes"]) == ("local", "1")  # not on unknown machines
    reuse = ":reuse" if plan.reuses_reference and is_here else ""
    wanted = f"{num_ranks}{reuse}"
    everyone = tuple(each.name for each, _ in rows)
    label = "numerics  float64 reference"
    yield [Job(label, row, reference, exact, None, "reference", wanted, everyone)]
    floors = []
    for name, channels_last in zip(FLOORS, (True, False), strict=True):
        at = comparison.numerics_folder(folder, name)
        floor = {**plain, "ddp": {"channels_last": channels_last}}
        label = f"numerics  plain ddp{'' if channels_last else ', other layout'}"
        floors.append(Job(label, row, at, floor, None, "floor", str(reference), everyone))
    kinds = {row.name: _kind_of_reference(row_task) for row, row_task in rows}
    references, checks = {"": reference}, []
    for row, row_task in rows:
        kind = kinds[row.name]
        if kind not in references:
            shared = mesh.workers_per_batch(config.task_of_values(row_task))
            merged = {**exact, "batch_size": exact["batch_size"] * shared} if shared > 1 else exact
            layout = f"{num_ranks // shared}x{shared}" if shared > 1 else f"{num_ranks}:undropped"
            references[kind] = reference.with_name(f"{REFERENCE}-{kind.replace(' ', '-')}")
            label = f"numerics  float64 reference, {kind}"
            alike = tuple(name for name, other in kinds.items() if other == kind)
            yield [
                Job(label, row, references[kind], merged, None, "reference", layout + reuse, alike)
            ]
        at = comparison.numerics_folder(folder, row.folder)
        check = Job(
            f"numerics  {row.name}", row, at, {**row_task, **steps}, None, "check",
            str(references[kind]),
        )  # fmt: skip
        checks.append(_copy_of_floor(check, floors) or check)
    # On a CPU of this machine nothing but memory limits how many there are at once.
    may_be_at_once = is_here and all(task["device"] == "cpu" for _, task in rows)

    def grouped(passes: list[Job]) -> list[list[Job]]:
        return [passes] if may_be_at_once else [[one] for one in passes]

    yield from grouped([*floors, *(check for check in checks if check.kind != "copy")])
    yield from ([check] for check in checks if check.kind == "copy")
    draws = [comparison.free_draws_folder(floor.folder) for floor in floors]
    is_begun = any(at.exists() for at in draws)
    if is_begun or numerics.needs_free_draws(comparison.of_plan(plan, folder, allow_mixed=True)):
        again = [
            dataclasses.replace(
                floor_job, label=f"{floor_job.label}, free run again", folder=at, kind="free_draws"
            )
            for floor_job, at in zip(floors, draws, strict=True)
        ]
        yield from grouped(again)


def _kind_of_reference(task: dict[str, Any]) -> str:
    """Return what sets a row's float64 reference apart from that of most rows, or nothing."""
    whole = config.task_of_values(task)
    shared = mesh.workers_per_batch(whole)
    if shared > 1:
        return f"{shared} workers a batch"
    # Whose threads cannot be given masks.
    return "without dropout" if config.devices_per_worker(whole) > 1 else ""


def _copy_of_floor(check: Job, floors: Sequence[Job]) -> Job | None:
    """Return a job that copies plain ddp's pass for a row that is plain ddp; None for others."""
    for floor in floors:
        if config.task_of_values(check.task) == config.task_of_values(floor.task):
            label = f"{check.label}, as {floor.label.removeprefix('numerics  ')}"
            argument = str(floor.folder)
            return dataclasses.replace(check, label=label, kind="copy", argument=argument)
    return None


def plain_task(task: dict[str, Any]) -> dict[str, Any]:
    """Return the task with engine ddp and no options; on the CPU if torch lacks the device.

    Each worker then has the whole model, and a batch of its own.
    """
    of_mesh = {field.name: field.default for field in dataclasses.fields(MeshFlags)}
    whole = config.task_of_values(task)
    num_devices = config.devices_per_worker(whole)
    plain = {**task, **of_mesh, "engine": "ddp", "ddp": {}}
    plain["nproc_per_node"] *= num_devices
    if plain.get("threads") is not None:
        plain["threads"] = max(1, plain["threads"] // num_devices)
    if plain.get("batch_size") is not None:
        plain["batch_size"] //= mesh.workers_per_batch(whole) * num_devices
    try:
        launchers.resolve(config.task_of_values(plain))
    except RequestError:
        return {**plain, "device": "cpu"}
    return plain


def with_cache(row: RowPlan, folder: Path) -> dict[str, Any]:
    """Return the row's flags, with the engine's compile cache in the comparison's folder."""
    assert row.task is not None
    engine = row.task["engine"]
    options = row.task.get(engine, {})
    if "cache_dir" not in options:
        return row.task
    return {**row.task, engine: {**options, "cache_dir": str(cache_folder(folder, row))}}


def cache_folder(folder: Path, row: RowPlan) -> Path:
    """Return the folder of a row's compile cache."""
    return folder / "caches" / row.folder


def rows_with_input_round(plan: ComparisonPlan) -> set[str]:
    """Return the names of the rows that also train without input, on synthetic data."""
    data = next(row.task.get("data", "") for row in plan.rows if row.task is not None)
    if not plan.input_round or config.data_name(data)[0] == "synthetic":
        return set()
    return {plan.baseline} if plan.input_round_of_baseline else {row.name for row in plan.rows}
