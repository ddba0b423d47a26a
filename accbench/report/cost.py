"""What an engine costs before it is faster, and when that is paid back."""

import dataclasses
import statistics

from accbench.report.comparison import ComparisonRow


@dataclasses.dataclass(frozen=True)
class Cost:
    """The seconds that an engine needs before it is faster.

    Cold: caches as in the first round. Warm: the median of the other rounds. None: not known, or
    not defined.
    """

    first_step_cold_s: float | None = None
    first_step_warm_s: float | None = None
    compile_cold_s: float | None = None
    compile_warm_s: float | None = None
    break_even_steps: int | None = None
    """Steps after which a cold start is paid back; None: never, or not known."""
    break_even_steps_warm: int | None = None
    break_even_samples: int | None = None
    """The same in samples, after a cold start."""
    break_even_epochs: float | None = None
    """The same in epochs, after a cold start."""
    samples_per_epoch: int | None = None
    price_per_epoch: float | None = None
    joules_per_1000_samples: float | None = None
    """This and the fields below: NVIDIA devices alone, median of the rounds."""
    power_w: float | None = None
    sm_clock_mhz: float | None = None
    throttled_share: float | None = None


def compute_cost(
    row: ComparisonRow, baseline: ComparisonRow, speedup: float | None,
    price_per_hour: float | None,
) -> Cost:  # fmt: skip
    """Compute the cost of a row relative to the baseline's.

    Args:
        row: the row.
        baseline: the row that it is compared with.
        speedup: the row's over the baseline, which the break-even follows from: rows may have run
            in different rounds, on a machine whose speed changes.
        price_per_hour: of all devices together; None: not known.
    """
    cold, warm = _starts(row)
    base_cold, base_warm = _starts(baseline)
    saved_s = None if row is baseline else _saved_s_per_step(row, baseline, speedup)
    steps = _break_even(saved_s, cold[0], base_cold[0])
    a_step, epoch = _samples_a_step(row), _samples_per_epoch(row)
    samples = steps * a_step if steps is not None and a_step else None
    speed = row.median("samples_per_s")
    return Cost(
        first_step_cold_s=cold[0], first_step_warm_s=warm[0],
        compile_cold_s=cold[1], compile_warm_s=warm[1],
        break_even_steps=steps,
        break_even_steps_warm=_break_even(saved_s, warm[0], base_warm[0]),
        break_even_samples=samples,
        break_even_epochs=samples / epoch if samples is not None and epoch else None,
        samples_per_epoch=epoch,
        price_per_epoch=(
            price_per_hour * epoch / speed / 3600 if price_per_hour and epoch and speed else None
        ),
        joules_per_1000_samples=row.median("joules_per_1000_samples"),
        power_w=row.median("power_w"),
        sm_clock_mhz=row.median("sm_clock_mhz"),
        throttled_share=row.median("throttled_share"),
    )  # fmt: skip


Start = tuple[float | None, float | None]


def _starts(row: ComparisonRow) -> tuple[Start, Start]:
    """Return (time to first step, compile seconds): cold, and the median of the warm rounds."""
    cold: Start = (None, None)
    warm: list[Start] = []
    for number, run in enumerate(row.rounds):
        if run.status != "ok" or run.end is None:
            continue
        start = (run.end.time_to_first_step_s, run.end.compile_s)
        if number == 0:
            cold = start
        else:
            warm.append(start)
    return cold, (_median([s[0] for s in warm]), _median([s[1] for s in warm]))


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _saved_s_per_step(
    row: ComparisonRow, baseline: ComparisonRow, speedup: float | None
) -> float | None:
    """Return the seconds that the row saves in a step of the rounds that both have run in."""
    pairs = zip(row.rounds, baseline.rounds, strict=False)
    both = [base for own, base in pairs if (own.status, base.status) == ("ok", "ok")]
    known = [run.steps_per_s for run in both if run.steps_per_s]
    return (1 - 1 / speedup) / statistics.median(known) if known and speedup else None


def _break_even(
    saved_s: float | None, start_s: float | None, baseline_start_s: float | None
) -> int | None:
    if saved_s is None or saved_s <= 0 or start_s is None or baseline_start_s is None:
        return None
    return max(0, -int(-(start_s - baseline_start_s) // saved_s))


def _samples_a_step(row: ComparisonRow) -> int | None:
    header = next((run.header for run in row.good if run.header), None)
    return header.num_data_ranks * header.batch_size if header else None


def _samples_per_epoch(row: ComparisonRow) -> int | None:
    return next((run.end.samples_per_epoch for run in row.good if run.end), None)
