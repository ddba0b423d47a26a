"""The command `accbench compare`: each run of a plan in a fresh process, and then the report."""

import contextlib
import dataclasses
import itertools
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from accbench import config
from accbench.comparing import jobs
from accbench.comparing.job_runs import log_of, run, run_in_turns, run_side_by_side
from accbench.comparing.plan import CompareRequest, parse
from accbench.comparing.time_left import TimeLeftColumn, estimate_s, in_words
from accbench.config import plugins
from accbench.errors import RequestError, print_interruption, print_refusal
from accbench.recording import terminal
from accbench.report import analysis, comparison, conditions, publish
from accbench.report import run as runs
from accbench.report.comparison import REFERENCE, ComparisonPlan
from accbench.system import folders

# A pass holds its own state before and after a step, and the reference's.
_STATES_OF_A_PASS = 3


def main(argv: Sequence[str], prog: str) -> int:
    """Run the command `accbench compare`, and return the exit status."""
    with contextlib.ExitStack() as stack:
        try:
            request = parse(argv, prog)
            plan = request.plan
            task = config.task_of_values(next(row.task for row in plan.rows if row.task))
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
    """Print why the comparison cannot go on, and return the exit status."""
    if isinstance(error, RequestError):
        return print_refusal(prog, error)
    why = f"cannot write {error.filename or folder}: {error.strerror}"
    print(f"{prog}: {why}; once it can, go on with --output_dir {folder}", file=sys.stderr)
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
    # Of a comparison from before it was left out where runs follow each other.
    return dataclasses.replace(plan, usual_scatter=begun.usual_scatter) == begun


def _draw_order(plan: ComparisonPlan) -> ComparisonPlan:
    if plan.order_seed is not None:
        return plan
    return dataclasses.replace(plan, order_seed=secrets.randbelow(10**6))


def introduction(plan: ComparisonPlan, folder: Path) -> str:
    """Describe what the comparison will do, and which settings were chosen for the device."""
    task = next(row.task for row in plan.rows if row.task)
    what = task.get("model")
    plain = jobs.plain_task(task)
    batch = f"batch {plain.get('batch_size')} a worker, "
    if "script" in task:
        what, batch = task["script"], ""
    nodes = "" if task["nnodes"] == "1" else f"{task['nnodes']} nodes of "
    lines = [
        f"comparing {', '.join(row.name for row in plan.rows)} in {_rounds(plan)}"
        f"{', their windows in turn' if plan.alternates_windows else ''}: "
        f"{what}, {nodes}{plain['nproc_per_node']} x {task['device']}, {batch}"
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
    num_jobs = sum(map(len, jobs.in_order(plan, folder)))
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
        for group in jobs.in_order(plan, folder):
            due = [j for j in group if j.is_needed(failed) and not _is_done(j, plan, folder)]
            progress.advance(bar, len(group) - len(due))
            number = group[0].number
            at_once = len(due) > 1 and (plan.alternates_windows or number is None)
            for together in [due] if at_once else [[job] for job in due]:
                progress.update(bar, description=_label_of(together))
                finished = _run_undisturbed(plan, together, folder, progress.console)
                for job, one in zip(together, finished, strict=True) if number else ():
                    if one.status != "ok":
                        failed.add(job.row.name)
                    else:
                        _refuse_without_speed(one)
                left_s = estimate_s(plan, folder, jobs.rows_with_input_round(plan))
                if left_s is not None:
                    progress.update(bar, ends_at=time.monotonic() + left_s)
                for line in _news(plan, folder, number, left_s) if number else ():
                    if line not in told:
                        progress.console.print(line, markup=False)
                    told.add(line)
                progress.advance(bar, len(together))
            if plan.baseline in failed:
                progress.console.print(
                    f"{plan.baseline}, the baseline, failed: nothing can be held against it",
                    markup=False,
                )
                break
    for reference in comparison.numerics_folder(folder, "").glob(f"{REFERENCE}*"):
        tensors = reference / jobs.REFERENCE_TENSORS
        shutil.rmtree(tensors, ignore_errors=True)  # large, and no longer needed


def _label_of(together: list[jobs.Job]) -> str:
    if len(together) == 1:
        return together[0].label
    what = together[0].label.split("  ")[0]
    if together[0].number is None:
        return f"{what}  {len(together)} passes"
    return f"{what}  {', '.join(job.row.name for job in together)} in turn"


def _run_undisturbed(
    plan: ComparisonPlan, together: list[jobs.Job], folder: Path, console: Console
) -> list[runs.RecordedRun]:
    """Run jobs and print how they went, and once more if the plan's rule asks for it.

    Runs that have taken turns are repeated together.
    """
    finished = _run_and_tell(plan, together, folder, console)
    pairs = list(zip(together, finished, strict=True))
    reasons = {job.label: _reason_to_repeat(plan, folder, job, run) for job, run in pairs}
    if not any(reasons.values()):
        return finished
    again = [job for job, run in pairs if run.status == "ok"]
    for job in again:
        _set_aside(job, folder)
    for label, why in reasons.items():
        if why is not None:
            console.print(f"{label}: repeated, as {why}", markup=False)
    repeated = dict(zip(map(id, again), _run_and_tell(plan, again, folder, console), strict=True))
    return [repeated.get(id(job), run) for job, run in pairs]


def _run_and_tell(
    plan: ComparisonPlan, together: list[jobs.Job], folder: Path, console: Console
) -> list[runs.RecordedRun]:
    def tell(job: jobs.Job, finished: runs.RecordedRun) -> None:
        console.print(f"{job.label}: {_outcome(finished)}", markup=False)

    caches = [jobs.cache_folder(folder, job.row) for job in together]
    if len(together) == 1:
        finished = [run(together[0], caches[0])]
    elif together[0].number is None:
        needed = [_bytes_of_pass(plan, folder, job) for job in together]
        return run_side_by_side(together, caches, needed, tell)
    else:
        finished = run_in_turns(together, caches)
    for job, one in zip(together, finished, strict=True):
        tell(job, one)
    return finished


def _bytes_of_pass(plan: ComparisonPlan, folder: Path, job: jobs.Job) -> int | None:
    """Estimate the memory that a pass of the numerics needs, from the row's last round."""
    good = next(row.good for row in comparison.read_rows(plan, folder) if row.name == job.row.name)
    peak_bytes = good[-1].warmup_peak_memory_bytes if good else None
    if peak_bytes is None:
        return None
    return _STATES_OF_A_PASS * peak_bytes * job.task["nproc_per_node"]


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
    log = log_of(job.folder)
    log.rename(log_of(target))
    job.folder.rename(target)


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
    if comparison.is_cut_short(plan, rows, number):
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
    every = itertools.chain.from_iterable(jobs.in_order(plan, folder))
    checks = (other for other in every if other.kind in kinds)
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
