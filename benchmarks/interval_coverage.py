"""How often an interval holds the truth, and how often an A/A trial says faster or slower.

    python benchmarks/interval_coverage.py [--tiny]

Simulated comparisons of two rows whose truth is known, 2 to 10 rounds each. Noise is in the
logarithm of a run's speed, with a standard deviation of 3 %:

    normal     independent runs
    heavy      Student's t with 3 degrees of freedom, scaled likewise
    disturbed  normal, and one run in ten is slower by 15 % on average
    drift      normal, and every run is 3 % slower than the one before it

Order: `fixed` measures the baseline first in every round, `turns` is what compare does.
The interval "bootstrap" is the percentile bootstrap of the median of the ratios, and "t"
is Student's t of their logarithms. "Found" are rows 10 % faster that are called so. "looks" is what
compare does: it looks after each round from the third on, and ends where a row is decided; the
column of rounds has the mean number for equal rows and for those 10 % faster.
"""

import argparse
import itertools
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from scipy import special

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from accbench.report import sequential, verdict  # noqa: E402
from benchmarks.smoke import add_tiny  # noqa: E402

TRIALS, TINY_TRIALS = 20_000, 50
RUN_SD = 0.03
MIN_EFFECT = 0.02
TRUTH = 1.10
MOST_ROUNDS = 8
NOISES = ("normal", "heavy", "disturbed", "drift")


def trial_logs(noise: str, trials: int, rounds: int, random: np.random.Generator) -> np.ndarray:
    """Return the logarithms of two equal rows' speeds, (trials, rounds, 2)."""
    shape = (trials, rounds, 2)  # the last axis is the place within the round
    if noise == "heavy":
        logs = RUN_SD * random.standard_t(3, shape) / np.sqrt(3)
    else:
        logs = RUN_SD * random.normal(size=shape)
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


def of_t(logs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (mean, low, high), as `accbench.report.statistics` has it, for all trials at once."""
    rounds = logs.shape[1]
    middle = logs.mean(axis=1)
    half = special.stdtrit(rounds - 1, 0.975) * logs.std(axis=1, ddof=1) / np.sqrt(rounds)
    return middle, middle - half, middle + half


def share_of(words: tuple[str, ...], found: tuple[np.ndarray, ...]) -> float:
    """Return the part of the trials of which compare says one of `words`."""
    told = Counter(
        verdict.judge_interval(speedup, (low, high), MIN_EFFECT)
        for speedup, low, high in zip(*map(np.exp, found), strict=True)
    )
    return sum(told[word] for word in words) / len(found[0])


def of_looks(logs: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], float]:
    """Return (middle, low, high) where each trial ends, and the mean number of rounds."""
    most = logs.shape[1]
    rows, rounds = [], []
    for ratios in np.exp(logs).tolist():
        num = sequential.rounds_until_decided(ratios, most, MIN_EFFECT) or most
        speedup, interval = sequential.mean_with_interval(ratios[:num], most)
        rows.append(np.log([speedup, *interval]))
        rounds.append(num)
    middle, low, high = np.array(rows).T
    return (middle, low, high), float(np.mean(rounds))


def print_looks(noise: str, trials: int) -> None:
    """Print the line of a noise for comparisons that end when they are decided."""
    random = np.random.default_rng(1)
    logs = ratios(trial_logs(noise, trials, MOST_ROUNDS, random), True, random)
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


def main() -> None:
    """Print a line for every noise, order and number of rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_tiny(parser)
    trials = TINY_TRIALS if parser.parse_args().tiny else TRIALS
    print("| noise | order | rounds | interval | covers | A/A called | width % | found |")
    print("| --- | --- | ---: | --- | ---: | ---: | ---: | ---: |")
    cases = itertools.product(NOISES, (True, False), (2, 3, 5, 10))
    for noise, round_orders, rounds in cases:
        if not round_orders and noise != "drift":
            continue
        random = np.random.default_rng(1)
        logs = ratios(trial_logs(noise, trials, rounds, random), round_orders, random)
        for name, interval in (("bootstrap", of_bootstrap), ("t", of_t)):
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
    for noise in NOISES:
        print_looks(noise, trials)


if __name__ == "__main__":
    main()
