"""How often an interval holds the truth, and how often an A/A trial says faster or slower.

    python benchmarks/interval_coverage.py [--tiny]

Simulated comparisons of two rows whose truth is known, 2 to 10 rounds each. Noise is in the
logarithm of a run's speed, with a standard deviation of 3 %:

    normal     independent runs
    heavy      Student's t with 3 degrees of freedom, scaled likewise
    disturbed  normal, and one run in ten is slower by 15 % on average
    drift      normal, and every run is 3 % slower than the one before it
    wide       normal, with 9 %: for the looks alone

Order: `fixed` measures the baseline first in every round, `turns` is what compare does.
The interval "bootstrap" is the percentile bootstrap of the median of the ratios, and "t"
is Student's t of their logarithms. "Found" are rows 10 % faster that are called so. "looks" is what
compare does: it looks after each round from the third on, ends where a row is decided, and goes on
from eight rounds up to sixteen where the interval is too wide for a verdict; the column of rounds
has the mean number for equal rows and for those 10 % faster.

"usual scatter" is what `--quick` does on a CPU: the same interval, with the scatter of quiet
machines averaged in.

The second table has runs of ten windows of a second, as the default for a CPU has, on a machine on
which something else begins at random moments, once in ten seconds or in thirty. It takes a third of
the processors for three seconds, and the run gets two thirds of its speed meanwhile. Windows
scatter by 3 % besides. A run is judged by its mean or by the median of its windows, and may be
repeated by the rule of `accbench.report.disturbance`.
"""

import argparse
import itertools
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from scipy import special

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from accbench.comparing import defaults  # noqa: E402
from accbench.report import sequential, statistics, verdict  # noqa: E402
from accbench.report.disturbance import RepeatRule  # noqa: E402
from benchmarks.smoke import add_tiny  # noqa: E402

TRIALS, TINY_TRIALS = 20_000, 50
RUN_SD = 0.03
MIN_EFFECT = 0.02
TRUTH = 1.10
REPEATS, MAX_REPEATS = 8, 16
NOISES = ("normal", "heavy", "disturbed", "drift")


def trial_logs(noise: str, trials: int, rounds: int, random: np.random.Generator) -> np.ndarray:
    """Return the logarithms of two equal rows' speeds, (trials, rounds, 2)."""
    shape = (trials, rounds, 2)  # the last axis is the place within the round
    if noise == "heavy":
        logs = RUN_SD * random.standard_t(3, shape) / np.sqrt(3)
    else:
        logs = RUN_SD * random.normal(size=shape)
    if noise == "wide":
        logs *= 3
    if noise == "disturbed":
        logs -= (random.random(shape) < 0.1) * random.exponential(0.15, shape)
    if noise == "drift":
        logs -= 0.03 * np.arange(2 * rounds).reshape(rounds, 2)
    return logs


def ratios(logs: np.ndarray, round_orders: bool, random: np.random.Generator) -> np.ndarray:
    """Return the logarithms of second over first; the first runs first unless in turns."""
    found = logs[..., 1] - logs[..., 0]
    if not round_orders:
        return found
    # Both orders in every two rounds; which of them comes first is drawn.
    trials, rounds = found.shape
    first = random.integers(0, 2, (trials, (rounds + 1) // 2))
    signs = np.stack([2 * first - 1, 1 - 2 * first], axis=-1).reshape(trials, -1)
    return found * signs[:, :rounds]


def of_bootstrap(logs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (median, low, high) by 9,999 resamples, the same for all trials."""
    rounds = logs.shape[1]
    drawn = np.sort(np.random.default_rng(0).integers(0, rounds, (9999, rounds)), axis=1)
    middles = Counter(zip(drawn[:, (rounds - 1) // 2], drawn[:, rounds // 2], strict=True))
    ordered = np.sort(logs, axis=1)
    medians = np.stack([(ordered[:, i] + ordered[:, j]) / 2 for i, j in middles], axis=1)
    order = np.argsort(medians, axis=1)
    medians = np.take_along_axis(medians, order, axis=1)
    shares = np.cumsum(np.array(list(middles.values()))[order], axis=1) / 9999
    low = np.take_along_axis(medians, np.argmax(shares >= 0.025, axis=1)[:, None], axis=1)
    high = np.take_along_axis(medians, np.argmax(shares >= 0.975, axis=1)[:, None], axis=1)
    return np.median(logs, axis=1), low[:, 0], high[:, 0]


def of_t(
    logs: np.ndarray, usual_scatter: float | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (mean, low, high) for all trials at once.

    It is `accbench.report.statistics`; the first trials are held against it.
    """
    rounds = logs.shape[1]
    middle = logs.mean(axis=1)
    variance, degrees = logs.var(axis=1, ddof=1), rounds - 1
    if usual_scatter is not None:
        squares = degrees * variance + statistics.USUAL_DEGREES * usual_scatter**2
        degrees += statistics.USUAL_DEGREES
        variance = squares / degrees
    half = special.stdtrit(degrees, 0.975) * np.sqrt(variance / rounds)
    for ratios, *interval in zip(np.exp(logs[:20]), middle - half, middle + half, strict=False):
        _, expected = statistics.mean_with_interval(ratios.tolist(), usual_scatter=usual_scatter)
        if not np.allclose(np.exp(interval), expected, rtol=1e-4):
            raise AssertionError(f"{ratios}: {np.exp(interval)} beside {expected}")
    return middle, middle - half, middle + half


def of_usual_scatter(logs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (mean, low, high) as `--quick` has it on a CPU."""
    return of_t(logs, defaults.USUAL_SCATTER_ON_CPU)


def share_of(words: tuple[str, ...], found: tuple[np.ndarray, ...]) -> float:
    """Return the part of the trials of which compare says one of `words`."""
    told = Counter(
        verdict.judge_interval(speedup, (low, high), MIN_EFFECT)
        for speedup, low, high in zip(*map(np.exp, found), strict=True)
    )
    return sum(told[word] for word in words) / len(found[0])


def of_looks(logs: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], float]:
    """Return (middle, low, high) where each trial ends, and the mean number of rounds.

    It is `accbench.report.sequential` for all trials at once; the first ones are held against it.
    """
    trials = len(logs)
    ended = np.zeros(trials, bool)
    found, rounds = np.zeros((3, trials)), np.zeros(trials)
    effect = np.log1p(MIN_EFFECT)
    for num in range(sequential.FAR_LOOK, MAX_REPEATS + 1):
        middle, low, high = interval_after(logs[:, :num])
        shown = ((low > 0) & (middle >= effect)) | ((high < 0) & (middle <= -effect))
        decided = shown | ((low > -effect) & (high < effect))
        width = (np.exp(high) - np.exp(low)) / np.exp(middle)
        ends = decided | (num == MAX_REPEATS)
        if num >= REPEATS:
            ends |= width <= statistics.MAX_INTERVAL_WIDTH
        now = ends & ~ended
        found[:, now], rounds[now] = np.stack([middle, low, high])[:, now], num
        ended |= ends
    for ratios, num, interval in zip(np.exp(logs[:20]), rounds, found.T, strict=False):
        check_against_sequential(ratios.tolist(), int(num), interval)
    return (found[0], found[1], found[2]), float(rounds.mean())


def interval_after(logs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (middle, low, high) after the look of so many rounds, logs being (trials, rounds)."""
    num = logs.shape[1]
    if num == sequential.FAR_LOOK:
        middle = logs.mean(axis=1)
        scatter = np.maximum(logs.std(axis=1, ddof=1), sequential.FAR_SCATTER)
        half = sequential.FAR_Z * scatter / np.sqrt(num)
        return middle, middle - half, middle + half
    trim = num // sequential.TRIMMED_OF
    ordered = np.sort(logs, axis=1)[:, trim : num - trim]
    left = ordered.shape[1]
    middle = ordered.mean(axis=1)
    winsorized = np.clip(logs, ordered[:, :1], ordered[:, -1:])
    error = winsorized.std(axis=1, ddof=1) * np.sqrt((num - 1) / (left * (left - 1)))
    level = sequential.levels(REPEATS, MAX_REPEATS)[num]
    half = special.stdtrit(left - 1, 1 - level / 2) * error
    return middle, middle - half, middle + half


def check_against_sequential(ratios: list[float], num: int, found: np.ndarray) -> None:
    """Raise if a trial ends elsewhere than compare ends it."""
    end = sequential.find_end(ratios, REPEATS, MAX_REPEATS, MIN_EFFECT)
    speedup, interval = sequential.mean_with_interval(ratios[:num], REPEATS, MAX_REPEATS)
    if end.num_rounds != num or not np.allclose(np.exp(found), [speedup, *interval], rtol=1e-4):
        raise AssertionError(f"{ratios}: {num}, {found} beside {end}, {speedup}, {interval}")


def print_looks(noise: str, trials: int) -> None:
    """Print the line of a noise for comparisons that end when they are decided."""
    random = np.random.default_rng(1)
    logs = ratios(trial_logs(noise, trials, MAX_REPEATS, random), True, random)
    equal, equal_rounds = of_looks(logs)
    faster, faster_rounds = of_looks(logs + np.log(TRUTH))
    covers = np.mean((equal[1] <= 0) & (equal[2] >= 0))
    called = share_of((verdict.FASTER, verdict.SLOWER), equal)
    found = share_of((verdict.FASTER,), faster)
    width = 100 * np.median(np.exp(equal[2]) - np.exp(equal[1]))
    print(
        f"| {noise} | turns | {equal_rounds:.1f}, {faster_rounds:.1f} | looks | {covers:.1%} | "
        f"{called:.1%} | {width:.0f} | {found:.0%} |",
        flush=True,
    )


WINDOWS, BUSY_S, BUSY_SHARE, BUSY_SPEED = 10, 3.0, 0.33, 2 / 3


def busy_runs(
    trials: int, every_s: float, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return windows' logarithms of speed and others' share of the machine, (trials, windows)."""
    shape = (trials, WINDOWS)
    most = 8  # beginnings in the time that reaches into the run
    begins = random.uniform(-BUSY_S, WINDOWS, (trials, most, 1))
    happens = np.arange(most) < random.poisson((WINDOWS + BUSY_S) / every_s, (trials, 1))
    at = np.arange(WINDOWS)
    overlap = np.clip(np.minimum(begins + BUSY_S, at + 1) - np.maximum(begins, at), 0, 1)
    overlap = np.minimum(1, (overlap * happens[..., None]).sum(axis=1))
    logs = RUN_SD * (random.normal(size=(trials, 1)) + random.normal(size=shape))
    shares = BUSY_SHARE * overlap + 0.02 * np.abs(random.normal(size=shape))
    return logs - np.log1p(overlap * (1 / BUSY_SPEED - 1)), shares


def busy_trials(
    trials: int, every_s: float, takes_medians: bool, repeats: bool, random: np.random.Generator
) -> tuple[np.ndarray, float]:
    """Return logarithms of runs' speeds, (trials, rounds, 2), and repeats in the first rounds.

    The repeats are the mean over the trials, of the rounds up to REPEATS.
    """
    rule = RepeatRule(max_repeats=max(2, 2 * REPEATS // 2))

    def measure() -> tuple[np.ndarray, np.ndarray]:
        logs, shares = busy_runs(trials, every_s, random)
        speed = np.median(logs, 1) if takes_medians else -np.log(np.exp(-logs).mean(1))
        disturbed = (shares > rule.max_other_cpu_share).mean(1) > rule.max_disturbed_windows
        return speed, disturbed

    speeds, num_disturbed, num_repeats = [], np.zeros(trials), np.zeros(trials)
    for num_runs in range(1, 2 * MAX_REPEATS + 1):
        speed, disturbed = measure()
        num_disturbed += disturbed
        so_far = num_runs + num_repeats
        again = disturbed & (num_repeats < rule.max_repeats) & repeats
        again &= (so_far < 4) | (num_disturbed <= so_far / 2)
        other_speed, other_disturbed = measure()
        speeds.append(np.where(again, other_speed, speed))
        num_disturbed += again & other_disturbed
        num_repeats += again
        if num_runs == 2 * REPEATS:
            mean_repeats = float(num_repeats.mean())
    return np.stack(speeds, 1).reshape(trials, MAX_REPEATS, 2), mean_repeats


def print_busy(trials: int) -> None:
    """Print the table of a machine that something else uses at random moments."""
    print("\n| something else | a run is | repeated | covers | A/A called | width % | found |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    cases = itertools.product(
        (30, 10), (("its mean", False, False), ("its median", True, False),
                   ("its median, repeated", True, True)),
    )  # fmt: skip
    for every_s, (name, takes_medians, repeats) in cases:
        random = np.random.default_rng(1)
        speeds, repeated = busy_trials(trials, every_s, takes_medians, repeats, random)
        logs = ratios(speeds, True, random)
        equal, _ = of_looks(logs)
        faster, _ = of_looks(logs + np.log(TRUTH))
        covers = np.mean((equal[1] <= 0) & (equal[2] >= 0))
        called = share_of((verdict.FASTER, verdict.SLOWER), equal)
        width = 100 * np.median(np.exp(equal[2]) - np.exp(equal[1]))
        print(
            f"| every {every_s} s | {name} | {repeated:.1f} | {covers:.1%} | {called:.1%} | "
            f"{width:.0f} | {share_of((verdict.FASTER,), faster):.0%} |",
            flush=True,
        )


def main() -> None:
    """Print a line for every noise, order and number of rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_tiny(parser)
    trials = TINY_TRIALS if parser.parse_args().tiny else TRIALS
    print("| noise | order | rounds | interval | covers | A/A called | width % | found |")
    print("| --- | --- | ---: | --- | ---: | ---: | ---: | ---: |")
    cases = itertools.product((*NOISES, "wide"), (True, False), (2, 3, 4, 5, 10))
    for noise, round_orders, rounds in cases:
        if not round_orders and noise != "drift":
            continue
        random = np.random.default_rng(1)
        logs = ratios(trial_logs(noise, trials, rounds, random), round_orders, random)
        intervals = [("bootstrap", of_bootstrap), ("t", of_t)]
        if rounds <= 4:
            intervals.append(("usual scatter", of_usual_scatter))
        for name, interval in intervals:
            middle, low, high = interval(logs)
            covers = np.mean((low <= 0) & (high >= 0))
            called = share_of((verdict.FASTER, verdict.SLOWER), (middle, low, high))
            shift = np.log(TRUTH)
            found = share_of((verdict.FASTER,), (middle + shift, low + shift, high + shift))
            width = 100 * np.median(np.exp(high) - np.exp(low))
            print(
                f"| {noise} | {'turns' if round_orders else 'fixed'} | {rounds} | {name} | "
                f"{covers:.1%} | {called:.1%} | {width:.0f} | {found:.0%} |",
                flush=True,
            )
    for noise in (*NOISES, "wide"):
        print_looks(noise, trials)
    print_busy(trials)


if __name__ == "__main__":
    main()
