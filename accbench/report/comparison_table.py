"""A judged comparison as a terminal table or as Markdown."""

import math
from collections.abc import Callable

from accbench.report import markdown, numerics, sequential, statistics, table, verdict
from accbench.report.analysis import ComparisonResult, RowResult

_NOT_KNOWN = "-"


def number(value: float | None, pattern: str) -> str:
    """Format `value`, or a dash where it is not known."""
    return _NOT_KNOWN if value is None else pattern.format(value)


def speedup(row: RowResult) -> str:
    """Format the speedup with its interval; a single round has none."""
    if row.verdict == verdict.BASELINE:
        return "1"
    if row.speedup is None or row.speedup_ci95 is None:
        return number(row.speedup, "{:.3f}")
    return "{:.3f} ({:.3f} to {:.3f})".format(row.speedup, *row.speedup_ci95)


def first_step(row: RowResult) -> str:
    """Format the seconds to the first step, cold and warm."""
    cold, warm = row.cost.first_step_cold_s, row.cost.first_step_warm_s
    return f"{number(cold, '{:.1f}')} / {number(warm, '{:.1f}')}"


def break_even(row: RowResult) -> str:
    """Format the steps that pay back a cold start."""
    if row.verdict in (verdict.BASELINE, verdict.FAILED) or row.speedup is None:
        return _NOT_KNOWN
    return (
        number(row.cost.break_even_steps, "{:,}")
        if row.cost.break_even_steps is not None
        else "never"
    )


def peak_mib(row: RowResult) -> str:
    """Format the peak of memory in MiB."""
    return number(row.peak_memory_bytes and row.peak_memory_bytes / 2**20, "{:,.0f}")


def speed(row: RowResult, result: ComparisonResult) -> float | None:
    """Return units a second, in the result's unit."""
    return row.samples_per_s and row.samples_per_s * result.counted[1]


def columns(result: ComparisonResult) -> dict[str, Callable[[RowResult], str]]:
    """Return the columns: title -> cell of a row."""
    return {
        "engine": lambda row: row.name,
        f"{result.counted[0]}/s": lambda row: number(speed(row, result), "{:,.1f}"),
        **_COLUMNS,
    }


_COLUMNS: dict[str, Callable[[RowResult], str]] = {
    "speedup (95 %)": speedup,
    "over best non-XLA": lambda row: number(row.speedup_over_best, "{:.3f}"),
    "verdict": lambda row: row.verdict,
    "numerics": lambda row: row.numerics.verdict,
    "first step s cold/warm": first_step,
    "break-even steps": break_even,
    "peak MiB": peak_mib,
}
_SHARPER = (
    "too noisy: rounding alone, in plain ddp, could hide a wrong gradient; larger batches or "
    "images, float32, or a network whose residual branches begin at zero (timm:resnet50) make "
    "a sharp test"
)
LEFT = ("engine", "verdict", "numerics")


def _rounds(result: ComparisonResult) -> str:
    counts = sorted({row.rounds_ok for row in result.rows if row.rounds_ok})
    if len(counts) > 1:
        return f"{counts[0]} to {counts[-1]}"
    return str(counts[0] if counts else result.repeats)


def notes(result: ComparisonResult) -> list[str]:
    """Return what a reader of the table must know, one line each."""
    setting = ", ".join(
        f"{key} {value}" for key, value in result.setting.items() if value is not None
    )
    lines = [setting] if setting else []
    lines.append(
        f"{result.counted[0]}/s of all workers after the warm-up, median of {_rounds(result)} "
        f"rounds; speedup over {result.baseline}, geometric mean of the rounds' ratios; "
        f"differences under {result.min_effect:.0%} do not count"
    )
    if result.quick:
        lines.append(_quick_note(result))
    if result.usual_scatter is not None:
        lines.append(
            f"intervals take the ratios of rounds to scatter by {result.usual_scatter:.0%}, more "
            "than on a quiet machine, and by more where they did; next to a disturbed round the "
            "rounds alone decide where they scatter more"
        )
    if result.alternates_windows:
        lines.append(
            "the runs of a round trained their windows in turn, and a round's ratio is the "
            "interquartile mean of those of windows next to each other; "
            f"{result.counted[0]}/s are of all windows"
        )
        if result.num_runs_alone:
            lines.append(
                f"{result.num_runs_alone} runs had no other in between: memory was short, or the "
                "others had ended"
            )
    elif result.takes_medians:
        lines.append(
            "speedups compare the median window of each run, which a stall of seconds does not "
            f"move; {result.counted[0]}/s are of the whole time, stalls included"
        )
    if result.max_minutes is not None and any(_lacks_rounds(row, result) for row in result.rows):
        lines.append(f"there was no time for more rounds: --max_minutes {result.max_minutes:g}")
    if any(row.decided_after is not None for row in result.rows):
        lines.append("a row that is decided is measured no further; intervals hold for all looks")
    if result.order_seed is not None:
        lines.append(f"the order within each round was drawn: --order_seed {result.order_seed}")
    lines += [f"MIXED {line}" for line in result.mixed]
    for row in result.rows:
        lines += [f"{row.name}: {row.verdict}: {reason}" for reason in row.reasons]
        if row.numerics.reason:
            lines.append(f"{row.name}: numerics {row.numerics.verdict}: {row.numerics.reason}")
        tested = numerics.describe_coverage(row.numerics)
        if tested:
            lines.append(f"{row.name}: numerics: {tested}")
        lines += _extras(row, result) + _round_notes(row, result)
    if any(row.numerics.is_too_noisy for row in result.rows):
        lines.append(_SHARPER)
    return lines


def _lacks_rounds(row: RowResult, result: ComparisonResult) -> bool:
    """Return whether a row would have had more rounds, had there been time."""
    num_rounds = len(row.samples_per_s_rounds)
    if row.name == result.baseline or row.rounds_ok < num_rounds or row.decided_after is not None:
        return False
    if row.speedup is None or row.speedup_ci95 is None:
        return num_rounds < result.repeats
    is_wide = statistics.is_too_wide(row.speedup, row.speedup_ci95, result.min_effect)
    return num_rounds < (result.max_repeats if is_wide else result.repeats)


def _quick_note(result: ComparisonResult) -> str:
    """Say what a quick comparison did not test, and which differences it would not have shown."""
    untested = ["what the input costs"]
    if any(row.numerics.verdict == numerics.NOT_CHECKED for row in result.rows):
        untested.insert(0, "whether the rows train the same")
    halves = [
        math.log(row.speedup_ci95[1] / row.speedup_ci95[0]) / 2
        for row in result.rows
        if row.speedup_ci95 is not None and row.verdict != verdict.BASELINE
    ]
    if halves:
        half = math.expm1(min(max(halves), 1.0))
        untested.append(f"differences below {half:.0%}" if half < 1 else "differences below 2x")
    return f"--quick did not test {', '.join(untested)}; leave it out for a comparison that does"


def _extras(row: RowResult, result: ComparisonResult) -> list[str]:
    facts = []
    cost = row.cost
    if row.input_share is not None:
        facts.append(f"input takes {row.input_share:.0%} of the time")
    elif row.data_wait_share is not None:
        facts.append(f"waits for data {row.data_wait_share:.0%} of the time")
    if cost.compile_cold_s:
        warm = number(cost.compile_warm_s, "{:.1f}")
        facts.append(f"compiles {cost.compile_cold_s:.1f} s cold, {warm} s warm")
    if cost.break_even_epochs is not None and row.verdict != verdict.BASELINE:
        facts.append(
            f"pays back after {cost.break_even_samples:,} samples, "
            f"{cost.break_even_epochs:,.1f} epochs"
        )
    if cost.price_per_epoch is not None:
        facts.append(
            f"an epoch costs {cost.price_per_epoch:.3g} at {result.price_per_hour:g} an hour"
        )
    if cost.sm_clock_mhz is not None:
        facts.append(f"SM clock {cost.sm_clock_mhz:,.0f} MHz")
    if cost.throttled_share is not None:
        facts.append(f"throttled {cost.throttled_share:.0%} of the time")
    if cost.power_w is not None and cost.joules_per_1000_samples is not None:
        facts.append(
            f"{cost.power_w:,.0f} W, {cost.joules_per_1000_samples:,.0f} J a thousand samples"
        )
    return [f"{row.name}: {'; '.join(facts)}"] if facts else []


def _round_notes(row: RowResult, result: ComparisonResult) -> list[str]:
    """Return what happened in the row's rounds, one line each."""
    lines = []
    num_rounds = len(row.samples_per_s_rounds)
    if row.decided_after is None and num_rounds > result.repeats:
        lines.append(f"{row.name}: was measured up to {num_rounds} rounds, as it was not decided")
    if row.decided_after == sequential.FAR_LOOK:
        lines.append(
            f"{row.name}: decided after {row.decided_after} rounds, by an interval that takes for "
            f"granted that rounds scatter by {sequential.FAR_SCATTER:.0%}"
        )
    elif row.decided_after is not None:
        looks = row.decided_after - sequential.FIRST_LOOK + 1
        lines.append(
            f"{row.name}: decided after {row.decided_after} rounds, at look {looks} of those after "
            "each round"
        )
    for repeated in row.repeated_rounds:
        lines.append(f"round {repeated.number} of {row.name} was repeated: {repeated.reason}")
    if row.disturbed_rounds:
        first = row.disturbed_rounds[0]
        lines.append(
            f"{row.name}: {len(row.disturbed_rounds)} of {num_rounds} rounds stand though "
            f"disturbed; in round {first.number} {first.reason}"
        )
    if _differs_from_means(row):
        lines.append(
            f"{row.name}: with the stalls of its runs and of the baseline's the speedup is "
            f"{row.speedup_of_means:.3f}"
        )
    return lines


def _differs_from_means(row: RowResult) -> bool:
    """Return whether the speedup of whole runs lies outside the interval of median windows."""
    if row.speedup_of_means is None or row.speedup_ci95 is None:
        return False
    low, high = row.speedup_ci95
    return not low <= row.speedup_of_means <= high


def as_markdown(result: ComparisonResult) -> str:
    """Render as Markdown for an issue or a README; ends in a newline."""
    titles = columns(result)
    cells = [[cell(row) for cell in titles.values()] for row in result.rows]
    body = markdown.table(list(titles), LEFT, cells)
    return f"**{markdown.plain(result.headline)}**\n\n{body}\n\n{markdown.bullets(notes(result))}\n"


def terminal(result: ComparisonResult, width: int = 164) -> str:
    """Render for a terminal; ends in a newline."""
    titles = columns(result)
    cells = [[cell(row) for cell in titles.values()] for row in result.rows]
    return table.in_terminal(
        [*titles], LEFT, cells, width, before=[result.headline], after=notes(result)
    )
