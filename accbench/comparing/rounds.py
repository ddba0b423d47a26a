"""The command `accbench compare`: each run of a plan in a fresh process, and then the report."""

import contextlib
import dataclasses
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from accbench import config
from accbench.comparing import jobs, passes
from accbench.comparing.plan import CompareRequest, parse
from accbench.comparing.run import run_to_its_end
from accbench.comparing.time_left import TimeLeftColumn, estimate_s, in_words
from accbench.config import plugins
from accbench.errors import RequestError, print_interruption, print_refusal
from accbench.recording import records, terminal
from accbench.report import analysis, comparison, conditions, publish
from accbench.report import run as runs
from accbench.report.comparison import REFERENCE, ComparisonPlan
from accbench.system import folders


def main(argv: Sequence[str], prog: str) -> int:
    """Run the command `accbench compare`, and return the exit status."""
    with contextlib.ExitStack() as stack:
        try:
            request = parse(argv, prog)
            plan = request.plan
            task = config.parse(config.as_flags(next(row.task for row in plan.rows if row.task)))
            launcher = plugins.load("launchers", task.launcher)()
            if launcher.follows(task):
                from accbench.launchers.common import run as runner

                return runner.follow(task, prog)
            folder = stack.enter_context(claim(plan, request.folder))
            plan = ComparisonPlan.read(folder)  # with the order that the first call drew
        except RequestError as error:
            return print_refusal(prog, error)
        try:
            return _compare(dataclasses.replace(request, plan=plan), folder, prog)
        finally:
            launcher.farewell(task)


def _compare(request: CompareRequest, folder: Path, prog: str) -> int:
    plan = request.plan
    console = terminal.person_console(stderr=request.format == "json")
    console.print(introduction(plan, folder), markup=False)
    try:
        measure(plan, folder, console)
    except KeyboardInterrupt:
        return print_interruption(f"{prog}: interrupted; go on with --output_dir {folder}")
    except (RequestError, OSError) as error:
        return _stopped(prog, error, folder)
    results = comparison.read(folder, allow_mixed=True)
    try:
        for path in publish.write(results, folder):
            console.print(f"wrote {path}", markup=False)
    except OSError as error:
        return _stopped(prog, error, folder)
    console.print(publish.render([results], "table"), markup=False, end="")
    if request.format == "json":
        print(publish.render([results], "json"), end="", flush=True)
    return conditions.exit_status(analysis.judge(results), request.conditions, prog)


def _stopped(prog: str, error: RequestError | OSError, folder: Path) -> int:
    """Print why the comparison cannot go on writing its folder, and return the exit status."""
    if isinstance(error, OSError):
        error = RequestError(f"cannot write {error.filename or folder}: {error.strerror}")
    print(f"{prog}: {error}; once it can, go on with --output_dir {folder}", file=sys.stderr)
    return 2


@contextlib.contextmanager
def claim(plan: ComparisonPlan, wanted: str | None) -> Iterator[Path]:
    """Lock the comparison's folder for the block: a new one, or one of the same plan.

    Raises:
        RequestError: the folder cannot be written, holds something else, or another process is
            using it.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = (
                folders.create_run_folder("compare").absolute()
                if wanted is None
                else Path(wanted).absolute()
            )
            _check_content(plan, folder)  # before anything is made there
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(folders.lock(folder))
            _check_content(plan, folder)
            if not (folder / comparison.PLAN_FILE).exists():
                _draw_order(plan).write(folder)
        except OSError as error:
            raise RequestError(
                f"cannot write to --output_dir {wanted or 'runs'}: {error.strerror}; name one that "
                "can be written"
            ) from None
        yield folder


def _check_content(plan: ComparisonPlan, folder: Path) -> None:
    if (folder / comparison.PLAN_FILE).exists():
        if not _is_same_comparison(plan, ComparisonPlan.read(folder)):
            raise RequestError(
                f"{folder} holds a comparison of other settings; choose another --output_dir"
            )
    elif folder.exists() and any(path.name != folders.LOCK_FILE for path in folder.iterdir()):
        raise RequestError(f"{folder} is not empty and holds no comparison")


def _is_same_comparison(plan: ComparisonPlan, begun: ComparisonPlan) -> bool:
    if plan.order_seed is None:
        plan = dataclasses.replace(plan, order_seed=begun.order_seed)
    return plan == begun


def _draw_order(plan: ComparisonPlan) -> ComparisonPlan:
    if plan.order_seed is not None:
        return plan
    return dataclasses.replace(plan, order_seed=secrets.randbelow(10**6))


def introduction(plan: ComparisonPlan, folder: Path) -> str:
    """Describe what the comparison will do, and which settings were chosen for the device."""
    task = next(row.task for row in plan.rows if row.task)
    what = task.get("model")
    batch = f"batch {jobs.plain_task(task).get('batch_size')} a worker, "
    if "script" in task:
        what, batch = task["script"], ""
    nodes = "" if task["nnodes"] == "1" else f"{task['nnodes']} nodes of "
    lines = [
        f"comparing {', '.join(row.name for row in plan.rows)} in {_rounds(plan)}: "
        f"{what}, {nodes}{task['nproc_per_node']} x {task['device']}, {batch}"
        f"{task['amp_level']}, {task['max_steps']} steps"
    ]
    if plan.defaults:
        chosen = ", ".join(f"--{name} {value}" for name, value in plan.defaults.items())
        lines.append(f"chosen for this device: {chosen}")
    lines.append(f"the order within each round is drawn: --order_seed {plan.order_seed}")
    return "\n".join([*lines, f"in {folder}"])


def _rounds(plan: ComparisonPlan) -> str:
    if plan.quick:
        return f"at most {plan.repeats} rounds of {plan.max_minutes:g} min together"
    if not plan.stops_when_decided:
        return f"{plan.repeats} rounds"
    more = f", {plan.most_rounds} where they scatter" if plan.most_rounds > plan.repeats else ""
    return f"at most {plan.repeats} rounds{more}"


def measure(plan: ComparisonPlan, folder: Path, console: Console) -> None:
    """Run the jobs that have not yet succeeded; a row that fails gets no further runs."""
    num_jobs = sum(1 for _ in jobs.in_order(plan, folder))
    failed: set[str] = {row.name for row in plan.rows if row.task is None}
    told: set[str] = set()
    for row in plan.rows:
        if row.task is None:
            console.print(f"{row.name}: {row.reason}", markup=False)
    left_s = estimate_s(plan, folder, jobs.rows_with_input_round(plan))
    console.print(
        "how long it takes is told after the first round"
        if left_s is None
        else f"{in_words(left_s)} left",
        markup=False,
    )
    with _progress(console) as progress:
        bar = progress.add_task("", total=num_jobs)
        for job in jobs.in_order(plan, folder):
            progress.update(bar, description=job.label)
            if job.row.name not in failed and not _is_done(job, plan, folder):
                finished = _run_undisturbed(plan, job, folder, progress.console)
                if job.number is not None and finished.status != "ok":
                    failed.add(job.row.name)
                elif job.number is not None:
                    _refuse_without_speed(finished)
                left_s = estimate_s(plan, folder, jobs.rows_with_input_round(plan))
                if left_s is not None:
                    progress.update(bar, ends_at=time.monotonic() + left_s)
                lines = [] if job.number is None else _news(plan, folder, job.number, left_s)
                for line in lines:
                    if line not in told:
                        progress.console.print(line, markup=False)
                    told.add(line)
            progress.advance(bar)
    for reference in comparison.numerics_folder(folder, "").glob(f"{REFERENCE}*"):
        tensors = reference / jobs.REFERENCE_TENSORS
        shutil.rmtree(tensors, ignore_errors=True)  # large, and no longer needed


def _run_undisturbed(
    plan: ComparisonPlan, job: jobs.Job, folder: Path, console: Console
) -> runs.RecordedRun:
    """Run a job and print how it went, and once more if the plan's rule asks for it."""
    finished = _run_and_tell(job, folder, console)
    why = _reason_to_repeat(plan, folder, job, finished)
    if why is None:
        return finished
    _set_aside(job, folder)
    console.print(f"{job.label}: repeated, as {why}", markup=False)
    return _run_and_tell(job, folder, console)


def _run_and_tell(job: jobs.Job, folder: Path, console: Console) -> runs.RecordedRun:
    finished = run(job, jobs.cache_folder(folder, job.row))
    console.print(f"{job.label}: {_outcome(finished)}", markup=False)
    return finished


def _reason_to_repeat(
    plan: ComparisonPlan, folder: Path, job: jobs.Job, finished: runs.RecordedRun
) -> str | None:
    """Return what disturbed a round's run, if the plan's rule has it measured again."""
    rule = plan.repeat_rule
    if rule is None or job.number is None or finished.status != "ok":
        return None
    rows = comparison.read_rows(plan, folder)
    set_aside = [aside.run for row in rows for aside in row.set_aside]
    of_rounds = [run for row in rows for run in row.rounds if run.status == "ok"]
    is_repeat = comparison.set_aside_folder(folder, job.number, job.row).exists()
    if not rule.asks_to_repeat(finished, [*of_rounds, *set_aside], len(set_aside), is_repeat):
        return None
    return rule.disturbance_of(finished)


def _set_aside(job: jobs.Job, folder: Path) -> None:
    """Move a run's folder and its log to where the comparison keeps repeated runs."""
    assert job.number is not None
    target = comparison.set_aside_folder(folder, job.number, job.row)
    target.parent.mkdir(parents=True, exist_ok=True)
    log = _log_of(job.folder)
    log.rename(_log_of(target))
    job.folder.rename(target)


def _log_of(folder: Path) -> Path:
    """Return the file for the output of the launcher of a run."""
    return folder.parent / f"{folder.name}.log"


def _news(plan: ComparisonPlan, folder: Path, number: int, left_s: float | None) -> Iterator[str]:
    """Yield a line for each row that ends or goes on because of this round, and for its end."""
    rows = comparison.read_rows(plan, folder)
    baseline = next(row for row in rows if row.name == plan.baseline)
    for row in rows:
        if row is baseline or len(row.good) < number or len(baseline.good) < number:
            continue
        end = comparison.find_end(plan, row, baseline)
        if end.is_decided and end.num_rounds == number < plan.repeats:
            yield f"{row.name} is decided after {number} rounds"
        elif end.num_rounds > number == plan.repeats:
            yield (
                f"{row.name} is not decided after {number} rounds: measuring up to "
                f"{plan.most_rounds}"
            )
    if any(row.rounds[number - 1].status == "not run" for row in rows if len(row.rounds) >= number):
        return
    if comparison.rounds_in_time(plan, rows) == number < plan.repeats:
        yield f"--max_minutes {plan.max_minutes:g} has no time for a round after {number}"
    if left_s:
        yield f"{in_words(left_s)} left after round {number}"


def _refuse_without_speed(finished: runs.RecordedRun) -> None:
    """Raise if a round's run had no step to measure, because no other run will have one.

    Raises:
        RequestError: all its steps were part of the warm-up.
    """
    if finished.samples_per_s or finished.end is None:
        return
    raise RequestError(
        f"the run ended after {finished.end.num_steps} steps, all of them in the warm-up, so that "
        f"nothing was measured: give it more data or --epochs, or a --warmup_steps below "
        f"{finished.end.num_steps}"
    )


def _is_done(job: jobs.Job, plan: ComparisonPlan, folder: Path) -> bool:
    """Return whether a run has already succeeded, and the files that other runs need are there."""
    is_ok = runs.read_if_there(job.folder).status == "ok"
    tensors = job.folder / jobs.REFERENCE_TENSORS
    if not is_ok or job.kind != "reference" or tensors.exists():
        return is_ok
    kinds = ("floor", "check", "free_draws")
    checks = (other for other in jobs.in_order(plan, folder) if other.kind in kinds)
    return all(runs.read_if_there(check.folder).status == "ok" for check in checks)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeLeftColumn(), console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip


def _outcome(run: runs.RecordedRun) -> str:
    if run.status != "ok" or run.end is None:
        return f"{run.status}: {run.end.error if run.end else 'no end'}"
    if run.numerics:
        phases = ("step", "reference", "noise of free")
        kept = any(record.phase == "kept" for record in run.numerics)
        num_steps = sum(record.phase in phases for record in run.numerics)
        return f"{num_steps} steps{', kept from an earlier comparison' if kept else ''}"
    if not run.samples_per_s:
        return "no steps after the warm-up"
    unit, units_per_sample = run.counted
    return (
        f"{run.samples_per_s * units_per_sample:,.1f} {unit}/s, first step after "
        f"{run.end.time_to_first_step_s or 0:.1f} s"
    )


def run(job: jobs.Job, cache: Path) -> runs.RecordedRun:
    """Run a job in a process of its own, and return its record, also when the job failed."""
    shutil.rmtree(job.folder, ignore_errors=True)
    if job.kind == "copy":
        passes.copy_without_draws(Path(job.argument), job.folder)
        return runs.read_if_there(job.folder)
    if job.number == 1:
        shutil.rmtree(cache, ignore_errors=True)
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    log = _log_of(job.folder)
    log.write_bytes(b"")  # a launcher that is killed at once leaves none
    flags = config.as_flags(job.task)
    num_devices = job.task["nproc_per_node"] if job.task["device"] == "cuda" else 0
    if plugins.load("launchers", job.task["launcher"]).elsewhere:
        num_devices = None  # the run is on other machines
    exit_status = run_to_its_end(job.kind, job.argument, flags, job.folder, log, num_devices)
    path = job.folder / config.RECORDS_FILE
    path.parent.mkdir(exist_ok=True)
    if runs.read_if_there(job.folder).end is None:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        why = lines[-1] if lines else f"exit status {exit_status}"
        records.append(path, records.EndRecord("error", why))
    return runs.read(job.folder)
